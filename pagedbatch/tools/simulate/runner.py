"""A runner that computes nothing: it ends each output at its given length, and beams part as real ones do.

Knows no pool and no queue.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from pagedbatch.step import (
    BeamResult,
    BeamTask,
    ModelRunnerOutput,
    PromptScores,
    PromptTask,
    SampleResult,
    SampleTask,
    SchedulerOutput,
)
from pagedbatch.tools.simulate.genealogy import next_parents

#: What it draws is below 0, so that no prompt of a real model holds it.
END = -1


class LengthRunner:
    """Draws for requests whose outputs' lengths are known.

    `lengths` holds, by a request's `rng_key`, the length of each of its samples, the end token included; of a beam
    search, which is as long as its first, by the `seed` in its params. A sample's tokens all stand for its number and
    a beam's for its rank: no two write alike, so that nothing is shared but what a fork shares.
    """

    def __init__(self, lengths: Mapping[int, tuple[int, ...]], seed: int = 0) -> None:
        self._lengths = lengths
        self._seed = seed

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        return ModelRunnerOutput(
            samples=[self._draw(task) for task in step.samples],
            beams=[self._rank(task) for task in step.beams],
            prompts=[_score(task) for task in step.prompts],
        )

    def _draw(self, task: SampleTask) -> SampleResult:
        lengths, position = self._lengths[task.rng_key], task.position + 1
        drawn = [END if lengths[index] <= position else _writing(index) for index in task.sample_indices]
        return SampleResult(drawn, [0.0] * len(drawn))

    def _rank(self, task: BeamTask) -> BeamResult:
        """As many candidates as there are beams; in the last step they end, before as many that would go on."""
        key, num_beams = task.params.seed, task.params.beams_per_group
        if task.position == 0:
            parents = [0] * num_beams
        else:
            # By position, not by call: whatever the scheduler does, a search's beams descend alike.
            parents = next_parents(num_beams, random.Random(f"{self._seed} {key} {task.position}"))
        token_ids = [_writing(rank) for rank in range(num_beams)]
        if self._lengths[key][0] <= task.position + 1:
            parents, token_ids = parents * 2, [END] * num_beams + token_ids
        scores = [-float(rank) for rank in range(len(parents))]
        return BeamResult(parents, token_ids, scores, [0.0] * len(parents))


def _score(task: PromptTask) -> PromptScores:
    return PromptScores([0.0] * len(task.targets), [[] for _ in task.targets])


def _writing(number: int) -> int:
    """The token that a sample, or the beam of a rank, goes on with."""
    return END - 1 - number

"""A runner that computes nothing: outputs end at given lengths, and beams descend from each other as real ones do.

A survivor of a step descends from the beam of its own rank with probability `STAYS`, else from any beam, each as likely
(the Moran model of population genetics). Looking back from the beams of a step, that leaves as many different ancestors
as real searches do (`benchmarks/beam_sharing.py`: SmolLM2-135M-Instruct and stories260K, mean of both at 2 and 4 beams,
the latter alone at 6):

    steps back       1     2     4     8     16    32
    2 beams  real    1.74  1.55  1.30  1.11  1.02  1.00
             model   1.73  1.53  1.31  1.10  1.01  1.00
    4 beams  real    3.21  2.73  2.13  1.59  1.22  1.05
             model   3.25  2.77  2.20  1.60  1.18  1.02
    6 beams  real    4.68  3.95  3.04  2.22  1.59  1.22
             model   4.83  4.09  3.17  2.27  1.53  1.11

Real beams keep a few old lines longer than that: the model is 0 to 9% short at 32 steps.
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

#: The end token. All that is drawn is below 0, so that no prompt of a real model contains it.
END = -1
STAYS = 0.69


class LengthRunner:
    """Draws for requests whose output lengths are known.

    `lengths` has the length of each sample, end token included, by the `rng_key` of the request; for a beam search, all
    of whose beams are as long as the first, by the `seed` in its params. All tokens of a sample are its number, and all
    of a beam its rank: no two outputs are equal, so that nothing is shared but what a fork shares.
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
        drawn = [END if lengths[index] <= position else _token_of(index) for index in task.sample_indices]
        return SampleResult(drawn, [0.0] * len(drawn))

    def _rank(self, task: BeamTask) -> BeamResult:
        """A candidate for each beam; in the last step those end, and as many that would go on follow them."""
        key, num_beams = task.params.seed, task.params.beams_per_group
        if task.position == 0:
            parents = [0] * num_beams
        else:
            # Seeded by position, not by call: the descent does not depend on what the scheduler does.
            parents = next_parents(num_beams, random.Random(f"{self._seed} {key} {task.position}"))
        token_ids = [_token_of(rank) for rank in range(num_beams)]
        if self._lengths[key][0] <= task.position + 1:
            parents, token_ids = parents * 2, [END] * num_beams + token_ids
        scores = [-float(rank) for rank in range(len(parents))]
        return BeamResult(parents, token_ids, scores, [0.0] * len(parents))


def _score(task: PromptTask) -> PromptScores:
    return PromptScores([0.0] * len(task.targets), [[] for _ in task.targets])


def _token_of(number: int) -> int:
    """The token that a sample, or the beam of a rank, consists of."""
    return END - 1 - number


def next_parents(num_beams: int, rng: random.Random) -> list[int]:
    """The parent of each survivor of a step."""
    return [beam if rng.random() < STAYS else rng.randrange(num_beams) for beam in range(num_beams)]

"""A runner that computes nothing: it ends each output at its given length. Knows no pool and no queue."""

from __future__ import annotations

from collections.abc import Mapping

from pagedbatch.outputs import ModelRunnerOutput, SampleResult, SampleTask, SchedulerOutput

END = 0


class LengthRunner:
    """Draws for requests whose outputs' lengths are known.

    `lengths` holds, by a request's `rng_key`, the length of each of its samples, the end token included. A sample's
    tokens are its own number: no two samples write alike, so that nothing is shared but what a fork shares.
    """

    def __init__(self, lengths: Mapping[int, tuple[int, ...]]) -> None:
        self._lengths = lengths

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        return ModelRunnerOutput([self._draw(task) for task in step.samples], [])

    def _draw(self, task: SampleTask) -> SampleResult:
        lengths, position = self._lengths[task.rng_key], task.position + 1
        drawn = [END if lengths[index] <= position else index + 1 for index in task.sample_indices]
        return SampleResult(drawn, [0.0] * len(drawn))

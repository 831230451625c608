"""A runner whose steps fail when a test says so, and that leaves the pool as a step broken off half way does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fake_runner import FakeRunner

from pagedbatch.errors import BlockAccountingError
from pagedbatch.step import ModelRunnerOutput, SchedulerOutput

#: What is wrong with a step, if anything.
Fault = Callable[[SchedulerOutput], Exception | None]


def executed(runner: FakeRunner, step: SchedulerOutput) -> ModelRunnerOutput:
    """Its assertions end the run: the engine would take them for a row's fault."""
    try:
        return runner.execute(step)
    except AssertionError as error:
        raise BlockAccountingError(str(error)) from error


class FailingRunner:
    """`fault` is asked before each step. One that fails has moved no block; all it was to write holds nothing."""

    def __init__(self, runner: FakeRunner, fault: Fault) -> None:
        self._runner = runner
        self._fault = fault

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        error = self._fault(step)
        if error is None:
            return executed(self._runner, step)
        pool, size = self._runner.pool, self._runner.block_size
        for copy in (*step.swap_in, *step.copies):
            pool[copy.dst] = [None] * size
        for copy in step.swap_out:
            self._runner.swap[copy.dst] = [None] * size
        for each in step.sequences:
            for position in range(each.context_len, each.context_len + len(each.token_ids)):
                pool[each.block_table[position // size]][position % size] = None
        raise error


class NotNumbers:
    """A runner that finds no numbers for guilty rows, nor, beside one in a step, for any other."""

    def __init__(self, runner: FakeRunner, is_guilty: Callable[[int, int], bool]) -> None:
        self._runner = runner
        self._is_guilty = is_guilty  # of a row's key, at a position

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        result = executed(self._runner, step)
        keys = [(task.rng_key, task.position) for task in step.samples]
        keys += [(task.params.seed, task.position) for task in step.beams]
        if not any(self._is_guilty(*key) for key in keys):
            return result
        for each in step.sequences:  # the K/V of this step are no better
            for position in range(each.context_len, each.context_len + len(each.token_ids)):
                block = each.block_table[position // self._runner.block_size]
                self._runner.pool[block][position % self._runner.block_size] = -1
        return ModelRunnerOutput(
            samples=[drawn._replace(error="not a number") for drawn in result.samples],
            beams=[replace(ranked, error="not a number") for ranked in result.beams],
            prompts=[replace(scores, error="not a number") for scores in result.prompts],
        )


def key_at(step: SchedulerOutput, keys: set[int], position: int) -> bool:
    """Whether a step draws for one of these rows at this position or later. Beam tasks carry the key as a seed."""
    drawn = any(task.rng_key in keys and task.position >= position for task in step.samples)
    return drawn or any(task.params.seed in keys and task.position >= position for task in step.beams)

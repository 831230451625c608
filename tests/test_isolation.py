"""Steps that fail, without a model: who is to blame is found, and nobody else's outputs change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from examples import examples
from failing_runner import FailingRunner, Fault, NotNumbers, key_at
from fake_runner import FakeRunner
from fake_runs import VOCABULARY, FakeRun, blocks_at_most, fake_engine, fake_run, request
from hypothesis import given, settings
from hypothesis import strategies as st
from request_strategies import batches, engine_settings

from pagedbatch.engine.isolation import is_fatal, is_out_of_memory
from pagedbatch.errors import BlockAccountingError
from pagedbatch.sequence import Request
from pagedbatch.step import SchedulerOutput


def failing_run(batch: list[Request], fault: Fault, *, num_blocks: int = 120, **config: Any) -> FakeRun:
    """An engine with all requests, over a runner that fails as `fault` says."""
    fake = FakeRunner(num_blocks, config.get("block_size", 4), config.get("num_swap_blocks", 0), VOCABULARY)
    run = fake_engine(num_blocks=num_blocks, runner=FailingRunner(fake, fault), **config)
    run.runner = fake
    run.add(*batch)
    return run


def seeded(batch: list[Request]) -> list[Request]:
    return [replace(each, params=replace(each.params, seed=each.rng_key)) for each in batch]


def mixed(count: int = 8, **params: Any) -> list[Request]:
    """Single outputs, samples and beams in turn."""
    kinds: list[dict[str, Any]] = [{}, {"n": 3}, {"num_beams": 3, "n": 2}]
    settings = {"max_tokens": 12, "ignore_eos": True} | params
    return seeded([request(row, 5 + row, **kinds[row % 3], **settings) for row in range(count)])


def fails_for(keys: set[int], position: int = 0) -> Fault:
    return lambda step: RuntimeError("boom\nat length") if key_at(step, keys, position) else None


@pytest.mark.parametrize("position", [0, 4])
@pytest.mark.parametrize("guilty", [{0}, {5}, {1, 2}, {0, 1, 2, 3}, set(range(7))], ids=str)
def test_the_rows_that_fail_alone_are_errors_and_the_others_are_as_ever(guilty: set[int], position: int) -> None:
    run = failing_run(mixed(), fails_for(guilty, position)).drain()
    expected = fake_run(mixed()).answers()
    for row, answer in run.answers().items():
        if row in guilty:
            assert answer == "the model can't run this row, though it ran alone: RuntimeError: boom"
        else:
            assert answer == expected[row]
    assert run.counters.failed_steps >= 2 * len(guilty)
    assert run.counters.recomputed_tokens > 0
    assert run.counters.preemptions_recompute > 0


@settings(max_examples=examples(12), deadline=None)
@given(batches, engine_settings(), st.sets(st.integers(0, 6)), st.integers(0, 3), st.integers(0, 12))
def test_rows_that_fail_at_any_place(
    batch: list[Request], config: dict[str, Any], guilty: set[int], position: int, spare: int
) -> None:
    batch = seeded(batch)
    num_blocks = spare + max(blocks_at_most(each, config["block_size"]) for each in batch)
    answers = failing_run(batch, fails_for(guilty, position), num_blocks=num_blocks, **config).drain().answers()
    expected = fake_run(batch, block_size=16).answers()
    for row, answer in answers.items():
        if isinstance(answer, str):
            assert row in guilty
            assert "RuntimeError: boom" in answer
        else:
            assert answer == expected[row]


@settings(max_examples=examples(12), deadline=None)
@given(batches, engine_settings(), st.integers(1, 40), st.integers(0, 12))
def test_steps_that_are_too_large(batch: list[Request], config: dict[str, Any], most_tokens: int, spare: int) -> None:
    """Whoever fits into a step alone is answered, in smaller steps, as if nothing had been."""
    batch = seeded(batch)
    most_tokens = max(most_tokens, max(each.params.width for each in batch))
    num_blocks = spare + max(blocks_at_most(each, config["block_size"]) for each in batch)

    def fault(step: SchedulerOutput) -> Exception | None:
        return MemoryError("out of memory") if step.num_tokens > most_tokens else None

    run = failing_run(batch, fault, num_blocks=num_blocks, **config).drain()
    assert run.answers() == fake_run(batch, block_size=16).answers()


@settings(max_examples=examples(12), deadline=None)
@given(batches, engine_settings(), st.integers(0, 60), st.integers(0, 12))
def test_a_step_that_fails_for_once(batch: list[Request], config: dict[str, Any], when: int, spare: int) -> None:
    """Whatever state the step was in: nobody is to blame, and nothing changes."""
    batch = seeded(batch)
    num_blocks = spare + max(blocks_at_most(each, config["block_size"]) for each in batch)
    attempts = [0]

    def fault(step: SchedulerOutput) -> Exception | None:
        attempts[0] += 1
        return RuntimeError("once") if attempts[0] == when else None

    run = failing_run(batch, fault, num_blocks=num_blocks, **config).drain()
    assert run.counters.failed_steps <= 1, "the fake runner's own assertions hold afterwards"
    assert run.answers() == fake_run(batch, block_size=16).answers()


@settings(max_examples=examples(12), deadline=None)
@given(batches, engine_settings(), st.sets(st.integers(0, 6)), st.integers(0, 3), st.integers(0, 12))
def test_rows_beside_one_that_is_no_numbers(
    batch: list[Request], config: dict[str, Any], guilty: set[int], position: int, spare: int
) -> None:
    """It may spoil all that is in its steps."""
    batch = seeded(batch)
    num_blocks = spare + max(blocks_at_most(each, config["block_size"]) for each in batch)
    fake = FakeRunner(num_blocks, config["block_size"], config["num_swap_blocks"], VOCABULARY)
    run = fake_engine(
        num_blocks=num_blocks, runner=NotNumbers(fake, lambda key, at: key in guilty and at >= position), **config
    )
    run.add(*batch)
    answers = run.drain().answers()
    expected = fake_run(batch, block_size=16).answers()
    for row, answer in answers.items():
        if answer == "not a number":
            assert row in guilty
        else:
            assert answer == expected[row]


def test_a_device_that_does_nothing_any_more_ends_the_run() -> None:
    finished = 10

    def fault(step: SchedulerOutput) -> Exception | None:
        return ValueError("device is gone") if step.step >= finished else None

    run = failing_run(mixed(), fault)
    with pytest.raises(ValueError, match="device is gone"):
        run.drain()
    assert len(run.steps) == finished


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA error: device-side assert triggered"), BlockAccountingError("a bug")], ids=repr
)
def test_what_no_row_can_be_blamed_for_ends_the_run_at_once(error: Exception) -> None:
    asked: list[int] = []

    def fault(step: SchedulerOutput) -> Exception | None:
        asked.append(step.step)
        return error if step.step == 3 else None

    with pytest.raises(type(error)):
        failing_run(mixed(), fault).drain()
    assert asked == [0, 1, 2, 3], "nothing is tried again"


@pytest.mark.parametrize(
    ("error", "no_memory", "fatal"),
    [
        (MemoryError(), True, False),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), True, False),
        (RuntimeError("CUDA error: out of memory"), True, False),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ..."), True, False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False, True),
        (IndexError("index out of range in self"), False, False),
    ],
    ids=repr,
)
def test_kinds_of_errors(error: Exception, no_memory: bool, fatal: bool) -> None:
    assert (is_out_of_memory(error), is_fatal(error)) == (no_memory, fatal)


def test_after_memory_ran_out_steps_stay_smaller() -> None:
    def fault(step: SchedulerOutput) -> Exception | None:
        return MemoryError() if step.num_tokens > 20 else None

    run = failing_run(mixed(12), fault, max_num_batched_tokens=64).drain()
    assert run.answers() == fake_run(mixed(12)).answers()
    assert run.engine.scheduler.max_num_tokens == 16


def test_a_row_too_large_for_any_step_is_an_error() -> None:
    batch = seeded([request(0, 5, max_tokens=6), request(1, 5, n=9, max_tokens=6, ignore_eos=True)])
    run = failing_run(batch, lambda step: MemoryError("no room") if step.num_tokens > 8 else None).drain()
    answers = run.answers()
    assert answers[0] == fake_run(batch).answers()[0]
    assert answers[1] == "the model can't run this row, though it ran alone: MemoryError: no room"


def test_a_prompt_too_large_for_one_step_is_computed_in_smaller_ones() -> None:
    batch = [request(0, 50, max_tokens=4)]
    run = failing_run(batch, lambda step: MemoryError() if step.num_tokens > 15 else None).drain()
    assert run.answers() == fake_run(batch).answers()
    assert max(step.num_tokens for step in run.steps) <= 15


@pytest.mark.parametrize("moves", ["swap_out", "swap_in", "copies"])
def test_moves_of_a_step_that_fails_are_not_counted_on(moves: str) -> None:
    """The first step that moves blocks in this way fails, once, and has moved none."""
    batch = seeded([request(row, 9, n=3, max_tokens=30, ignore_eos=True) for row in range(4)])
    config: dict[str, Any] = {"num_blocks": 40, "num_swap_blocks": 200, "preemption": "swap"}
    failed: list[SchedulerOutput] = []

    def fault(step: SchedulerOutput) -> Exception | None:
        if not failed and getattr(step, moves):
            failed.append(step)
            return RuntimeError("once")
        return None

    run = failing_run(batch, fault, **config).drain()
    assert len(failed) == run.counters.failed_steps == 1
    assert run.answers() == fake_run(batch).answers()


def test_a_group_half_rebuilt_when_contents_are_forgotten_keeps_its_sharing() -> None:
    """Its pool is just large enough for siblings that hold the prompt once."""
    batch = seeded([request(0, 10, max_tokens=1), request(1, 9, n=4, max_tokens=5, ignore_eos=True)])

    def fault(step: SchedulerOutput) -> Exception | None:
        return MemoryError() if step.num_tokens > 4 else None

    config: dict[str, Any] = {"block_size": 1, "max_num_seqs": 8, "max_num_batched_tokens": 16, "prefix_cache": False}
    run = failing_run(batch, fault, num_blocks=blocks_at_most(batch[1], 1), **config).drain()
    assert run.answers() == fake_run(batch).answers()


def test_rows_that_come_during_a_trial_wait() -> None:
    run = failing_run(mixed(4), fails_for({1}))
    run.step()
    run.add(*seeded([request(row, 6, max_tokens=3) for row in (10, 11)]))
    run.step()
    assert not {10, 11} & set(run.running_ids())
    run.drain()
    assert [row for row, answer in run.answers().items() if isinstance(answer, str)] == [1]


class Stumbling:
    """A constraint whose states raise, when asked or when told."""

    max_tokens = None

    def __init__(self, when: str) -> None:
        self._when = when

    def start(self) -> Stumbling:
        return self

    fork = start

    def allowed(self) -> Any:
        import numpy as np

        from pagedbatch.constraint import AllowedIds

        if self._when == "asked":
            raise KeyError("no such state")
        return AllowedIds(np.arange(1, VOCABULARY))

    def advance(self, token_id: int) -> None:
        raise KeyError("no such state")


@pytest.mark.parametrize("when", ["asked", "told"])
@pytest.mark.parametrize("kind", [{}, {"n": 3}, {"num_beams": 3}], ids=str)
def test_a_row_whose_own_data_raises_is_an_error(kind: dict[str, int], when: str) -> None:
    batch = mixed(3)
    bad = replace(request(3, 6, max_tokens=9, ignore_eos=True, **kind), constraint=Stumbling(when))
    answers = fake_run([*batch, bad]).answers()
    assert "KeyError: 'no such state'" in str(answers.pop(3))
    assert answers == fake_run(batch).answers()

"""Who runs when, who gives way and how they come back: decisions seen from outside, step by step."""

from __future__ import annotations

from typing import Any

import pytest
from fake_runs import FakeRun, blocks_at_most, fake_engine, fake_run, request

from pagedbatch.errors import EngineStalledError
from pagedbatch.step import ModelRunnerOutput, SchedulerOutput


def long_request(request_id: int, prompt: int, **params: Any) -> Any:
    """One that ends by its length limit only."""
    return request(request_id, prompt, **({"max_tokens": 30, "ignore_eos": True} | params))


def queries(step: SchedulerOutput) -> list[int]:
    return [len(scheduled.token_ids) for scheduled in step.sequences]


# --- admission -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({}, "needs 28 KV blocks of 4 tokens (prompt 10 + max_tokens 100, n 1), but the pool has 27"),
        ({"n": 3}, "needs 80 KV blocks of 4 tokens (prompt 10 + max_tokens 100, n 3), but the pool has 79"),
        ({"num_beams": 2}, "needs 54 KV blocks of 4 tokens (prompt 10 + max_tokens 100, 2 beams), but the pool has 53"),
    ],
    ids=["greedy", "samples", "beams"],
)
def test_a_row_that_can_never_fit_is_an_error_and_the_rest_finish(params: dict[str, Any], words: str) -> None:
    large = long_request(1, 10, max_tokens=100, **params)
    needed = blocks_at_most(large, 4)
    batch = [long_request(0, 4), large, long_request(2, 4)]
    short_by_one = fake_run(batch, num_blocks=needed - 1)
    assert words in (short_by_one.outputs[1].error or "")
    assert short_by_one.outputs[1].outputs == []
    assert [short_by_one.outputs[row].error for row in (0, 2)] == [None, None]
    just_enough = fake_run(batch, num_blocks=needed)
    assert just_enough.outputs[1].error is None


def test_rows_run_by_priority_then_by_age() -> None:
    run = fake_engine(max_num_seqs=1)
    run.add(*(long_request(row, 3, max_tokens=2, priority=p) for row, p in enumerate([1, 0, 1, 0, -5])))
    run.drain()
    assert list(run.outputs) == [4, 1, 3, 0, 2]


def test_nobody_overtakes_a_row_that_waits_for_blocks() -> None:
    run = fake_engine(num_blocks=20)
    run.add(long_request(0, 40, max_tokens=4), long_request(1, 60, max_tokens=4), long_request(2, 4, max_tokens=4))
    run.step()
    assert run.running_ids() == [0]
    while not run.outputs:
        run.step()
    run.step()
    assert run.running_ids() == [1, 2]


def test_a_late_row_of_higher_priority_is_admitted_first_and_served_first() -> None:
    run = fake_engine(max_num_seqs=2)
    run.add(long_request(0, 3, max_tokens=3), long_request(1, 3), long_request(2, 3))
    run.step()
    run.add(long_request(3, 3, priority=-1))
    while not run.outputs:
        run.step()
    run.step()
    assert run.running_ids() == [3, 1]


@pytest.mark.parametrize(("num_blocks", "running"), [(21, 8), (22, 9)])
def test_admission_leaves_a_block_for_every_other_running_sequence(num_blocks: int, running: int) -> None:
    """Eight rows hold two blocks each. The ninth takes one and a tail, and leaves four."""
    run = fake_engine(num_blocks=num_blocks)
    run.add(*(long_request(row, 5) for row in range(8)), long_request(8, 3))
    run.step()
    assert len(run.running_ids()) == running


# --- budgets ---------------------------------------------------------------------------------------------------------


def test_a_long_prompt_is_computed_in_chunks() -> None:
    run = fake_engine(max_num_batched_tokens=10)
    run.add(long_request(0, 25, max_tokens=2))
    run.drain()
    assert [queries(step) for step in run.steps] == [[10], [10], [5], [1]]
    assert [len(step.samples) for step in run.steps] == [0, 0, 1, 1]


def test_a_chunk_shares_the_step_with_rows_that_decode() -> None:
    run = fake_engine(max_num_batched_tokens=10)
    run.add(long_request(0, 10, max_tokens=4), long_request(1, 20, max_tokens=2))
    run.drain()
    assert [queries(step) for step in run.steps[:4]] == [[10], [1, 9], [1, 9], [1, 2]]


def test_the_token_budget_holds() -> None:
    run = fake_run([long_request(row, 7 + row, n=1 + row % 3) for row in range(12)], max_num_batched_tokens=9)
    assert max(step.num_tokens for step in run.steps) <= 9


def test_the_sequence_budget_holds_before_samples_fork() -> None:
    run = fake_run([long_request(row, 5, n=3) for row in range(5)], max_num_seqs=8)
    assert max(snapshot.running_sequences for snapshot in run.snapshots) == 6


@pytest.mark.parametrize("budget", [{"max_num_seqs": 2}, {"max_num_batched_tokens": 3}], ids=str)
def test_a_group_wider_than_a_budget_runs_alone(budget: dict[str, Any]) -> None:
    run = fake_engine(**budget)
    run.add(long_request(0, 3, max_tokens=5), long_request(1, 3, n=6, max_tokens=5), long_request(2, 3, max_tokens=5))
    together = set()
    while run.engine.has_unfinished:
        run.step()
        together.add(tuple(run.running_ids()))
    assert together <= {(0,), (1,), (2,), ()}
    assert len(run.outputs[1].outputs) == 6


def take_all_blocks(run: FakeRun) -> None:
    """As if a row that nobody may preempt held them."""
    blocks = run.engine.scheduler.blocks
    blocks.create_table(-1, 99, [])
    blocks.extend(-1, 0, blocks.pool.num_available * blocks.block_size)


def give_back(run: FakeRun) -> None:
    run.engine.scheduler.blocks.free(-1)


# --- preemption ------------------------------------------------------------------------------------------------------


def until_preemption(run: FakeRun) -> None:
    while not run.snapshots or run.counters.preemptions_swap + run.counters.preemptions_recompute == 0:
        run.step()


def test_the_youngest_of_the_lowest_priority_gives_way() -> None:
    """Lower values run first; 1 and 3 rank last, and 3 is younger."""
    run = fake_engine(num_blocks=16, preemption="recompute")
    run.add(*(long_request(row, 8, priority=p) for row, p in enumerate([0, 1, 0, 1])))
    until_preemption(run)
    assert run.running_ids() == [0, 2, 1]
    assert run.counters.preemptions_recompute == 1


def test_those_who_stay_all_go_on_in_the_same_step() -> None:
    run = fake_engine(num_blocks=16, preemption="recompute")
    run.add(*(long_request(row, 8) for row in range(4)))
    until_preemption(run)
    assert queries(run.steps[-1]) == [1, 1, 1]


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    run = fake_engine(num_blocks=16, preemption="recompute")
    run.add(*(long_request(row, 8) for row in range(4)))
    while run.engine.pool_counts().free:
        run.step()
    run.add(long_request(4, 1, max_tokens=1))
    until_preemption(run)
    assert run.snapshots[-1].waiting_groups == 2


def test_a_recomputed_group_waits_for_all_blocks_that_it_lost() -> None:
    """Coming back earlier, it would be preempted again while it rebuilds its tables."""
    run = fake_engine(num_blocks=24, preemption="recompute")
    run.add(long_request(0, 8, max_tokens=80), long_request(1, 8, max_tokens=24, n=3))
    held = 0
    while not run.snapshots or run.counters.preemptions_recompute == 0:
        held = len({block for table in run.tables(1) for block in table}) if run.snapshots else 0
        run.step()
    assert held > 3
    available = 0
    while 1 not in run.running_ids():
        available = run.engine.scheduler.blocks.pool.num_available
        run.step()
    assert available >= held + 3
    run.drain()
    assert run.counters.preemptions_recompute == 1


def preempted(mode: str, num_swap_blocks: int) -> tuple[int, int]:
    """Preemptions (swap, recompute) of single sequences, and of samples, that had to give way."""
    batch = [long_request(row, 8, n=1 + row % 2) for row in range(6)]
    counters = fake_run(batch, num_blocks=25, num_swap_blocks=num_swap_blocks, preemption=mode).counters
    return counters.preemptions_swap, counters.preemptions_recompute


def test_each_mode_preempts_in_its_own_way() -> None:
    swap, recompute = preempted("swap", 1000)
    assert (swap > 0, recompute) == (True, 0)
    swap, recompute = preempted("recompute", 1000)
    assert (swap, recompute > 0) == (0, True)


@pytest.mark.parametrize("mode", ["swap", "auto"])
def test_a_full_host_pool_means_recompute(mode: str) -> None:
    swap, recompute = preempted(mode, 0)
    assert (swap, recompute > 0) == (0, True)
    swap, recompute = preempted("swap", 8)
    assert swap > 0
    assert recompute > 0


@pytest.mark.parametrize(("n", "swaps"), [(1, False), (3, True)])
def test_auto_swaps_groups_and_recomputes_single_sequences(n: int, swaps: bool) -> None:
    batch = [long_request(row, 8, n=n) for row in range(4)]
    counters = fake_run(batch, num_blocks=12 * n, num_swap_blocks=1000, preemption="auto").counters
    assert (counters.preemptions_swap > 0) == swaps
    assert (counters.preemptions_recompute > 0) != swaps


@pytest.mark.parametrize("prefix_cache", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_a_group_comes_back_with_its_sharing(mode: str, prefix_cache: bool) -> None:
    """Four samples of a 32-token prompt: four blocks of 8 held once, before and after."""
    run = fake_engine(num_blocks=16, block_size=8, num_swap_blocks=50, preemption=mode, prefix_cache=prefix_cache)
    run.add(long_request(0, 16, max_tokens=60), long_request(1, 32, n=4, max_tokens=20))
    run.step()
    run.step()
    before = run.tables(1)
    assert len({block for table in before for block in table}) == 4 + 4
    until_preemption(run)
    assert run.running_ids() == [0]
    while run.running_ids() != [1]:
        run.step()
    while not run.steps[-1].samples:
        run.step()
    after = run.tables(1)
    lengths = [len(table) for table in after]
    assert len({tuple(table[:4]) for table in after}) == 1
    assert len({block for table in after for block in table}) == 4 + sum(lengths) - 4 * 4
    run.drain()


def test_an_interrupted_rebuild_is_not_swapped_and_starts_again() -> None:
    batch = [long_request(0, 4, max_tokens=60), long_request(1, 4, n=3, max_tokens=30)]
    run = fake_engine(
        num_blocks=60, max_num_batched_tokens=4, num_swap_blocks=10, preemption="swap", prefix_cache=False
    )
    run.add(*batch)
    for _ in range(20):
        run.step()
    take_all_blocks(run)
    until_preemption(run)  # the whole group is too large for the host pool, the half is not
    give_back(run)
    run.step()
    assert run.running_ids() == [0, 1]
    scheduler = run.engine.scheduler
    has_table = [scheduler.blocks.has_table(seq.seq_id) for seq in scheduler.running[1].sequences]
    assert has_table[0]
    assert not has_table[-1]
    take_all_blocks(run)
    while len(run.running_ids()) == 2:
        run.step()
    assert (run.counters.preemptions_swap, run.counters.preemptions_recompute) == (0, 2)
    give_back(run)
    assert run.drain().answers() == fake_run(batch).answers()


# --- prefix cache ----------------------------------------------------------------------------------------------------

PROMPT = list(range(100, 133))


def test_equal_prompts_are_shared_within_the_step_that_computes_them() -> None:
    run = fake_engine(block_size=16)
    run.add(request(0, PROMPT, max_tokens=1), request(1, PROMPT, max_tokens=1))
    run.step()
    assert queries(run.steps[0]) == [33, 1]
    assert [run.outputs[row].num_cached_tokens for row in (0, 1)] == [0, 32]
    assert (run.counters.prefix_queried_tokens, run.counters.prefix_hit_tokens) == (66, 32)


def test_equal_prompts_are_shared_after_their_owner_is_gone() -> None:
    run = fake_run([request(0, PROMPT, max_tokens=3)], block_size=16)
    assert run.engine.pool_counts().cached == 2
    run.add(request(1, [*PROMPT[:20], 7, 7], max_tokens=3))
    run.drain()
    assert run.outputs[1].num_cached_tokens == 16


@pytest.mark.parametrize("length", [16, 32])
def test_at_least_one_token_is_computed(length: int) -> None:
    run = fake_engine(block_size=16)
    run.add(request(0, PROMPT[:length], max_tokens=1), request(1, PROMPT[:length], max_tokens=1))
    run.drain()
    assert queries(run.steps[0]) == [length, 16]


def test_without_the_cache_nothing_is_shared_between_rows_or_kept() -> None:
    run = fake_engine(block_size=16, prefix_cache=False)
    run.add(request(0, PROMPT, max_tokens=1), request(1, PROMPT, max_tokens=1))
    run.drain()
    assert queries(run.steps[0]) == [33, 33]
    assert run.engine.pool_counts().cached == 0


# --- when something is wrong -----------------------------------------------------------------------------------------


def test_a_step_that_gets_nowhere_is_an_error_with_the_state() -> None:
    run = fake_engine(num_blocks=10)
    take_all_blocks(run)
    run.add(long_request(0, 8))
    with pytest.raises(EngineStalledError, match=r"1 groups running \(1 sequences\), 0 waiting; blocks: 10 private"):
        run.step()


class OneRowOfNaN:
    """A runner whose logits are not numbers for row 1, from its third token on."""

    def __init__(self, run: FakeRun) -> None:
        self._runner = run.runner

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        result = self._runner.execute(step)
        samples = [
            drawn._replace(error="logits are not numbers") if (task.rng_key, task.position) == (1, 2) else drawn
            for task, drawn in zip(step.samples, result.samples, strict=True)
        ]
        return ModelRunnerOutput(samples, result.beams)


@pytest.mark.parametrize("n", [1, 3])
def test_logits_that_are_no_numbers_fail_their_row_only(n: int) -> None:
    run = fake_engine(runner=OneRowOfNaN(fake_engine()))
    batch = [long_request(row, 4, n=n) for row in range(3)]
    run.add(*batch)
    run.drain()
    expected = fake_run(batch).answers()
    assert run.answers() == {0: expected[0], 1: "logits are not numbers", 2: expected[2]}

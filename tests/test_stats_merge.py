"""The account of several pools as one: workers at the same time, and the lives of a worker one after another."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from snapshots import finished_row, snapshot
from test_memory import pools

from pagedbatch.outputs import EngineCounters, StepSnapshot
from pagedbatch.params import GenerationParams
from pagedbatch.stats import timeline
from pagedbatch.stats.memory import MemoryAccount
from pagedbatch.stats.merge import merge_concurrent, merge_sequential, sum_snapshots
from pagedbatch.stats.timeline import Timeline


def counters(tokens: int) -> EngineCounters:
    return EngineCounters(output_tokens=tokens, cow_copies=2 * tokens, preemptions_swap=tokens)


def observed(steps: list[StepSnapshot], tokens: int = 1, before: int = 0) -> MemoryAccount:
    """The account of a pool that ran `steps` and drew `tokens` in each, after `before` in another life."""
    account = MemoryAccount(num_blocks=64, block_size=16, block_bytes=1, max_num_seqs=8)
    for number, step in enumerate(steps, 1):
        account.observe(replace(step, step=number, counters=counters(before + tokens * number)))
    if steps:
        account.close(steps[-1].pool)
    return account


@given(st.lists(pools(), max_size=20), st.lists(pools(), min_size=1, max_size=20))
def test_lives_after_each_other_are_one_pool_that_went_on(
    first: list[StepSnapshot], second: list[StepSnapshot]
) -> None:
    merged = merge_sequential([observed(first), observed(second)])
    whole = observed(first + second)
    memory = merged.pool_memory().to_json()
    for name, expected in whole.pool_memory().to_json().items():
        assert memory[name] == (expected if isinstance(expected, dict) else pytest.approx(expected, abs=1e-6))
    assert merged.time().to_json() == pytest.approx(whole.time().to_json(), abs=1e-3)
    for point, expected in zip(merged.timeline(), whole.timeline(), strict=True):
        assert point.to_json() == pytest.approx(expected.to_json(), abs=1e-3)


def test_a_life_after_many_keeps_the_timeline_bounded() -> None:
    lives = []
    for life in range(1, 6):
        later = Timeline(max_points=4)
        for step in range(1, life + 1):
            later.add(snapshot(step, private=8, counters=counters(step)))
        lives.append(later)
    points = timeline.merge_sequential(lives, max_points=4).points()
    assert len(points) <= 4
    assert sum(point.steps for point in points) == 1 + 2 + 3 + 4 + 5
    assert points[-1].output_tokens == 15
    assert [point.step for point in points] == [
        1 + sum(each.steps for each in points[:place]) for place in range(len(points))
    ]


@given(st.lists(st.lists(pools(), min_size=1, max_size=12), min_size=1, max_size=4))
def test_pools_side_by_side_hold_together_what_each_holds(workers: list[list[StepSnapshot]]) -> None:
    accounts = [observed(steps) for steps in workers]
    untouched = copy.deepcopy(accounts)
    merged = merge_concurrent(accounts).pool_memory()
    each = [own.pool_memory() for own in accounts]
    for name in (
        *("num_blocks", "mean_live_blocks", "mean_logical_blocks", "mean_running_sequences", "final_live_blocks"),
        *("peak_live_blocks", "peak_shared_blocks", "peak_running_sequences", "cow_copies"),
    ):
        assert getattr(merged, name) == pytest.approx(sum(getattr(own, name) for own in each), abs=1e-5), name
    assert merged.preemptions.swap == sum(own.preemptions.swap for own in each)
    with_live = [[step for step in steps if step.pool.live] for steps in workers]
    weights = [len(steps) for steps in with_live]
    if sum(weights):
        for name in ("sharing_saving", "kv_used"):
            shares = [getattr(own, name) or 0 for own in each]
            mean = sum(share * weight for share, weight in zip(shares, weights, strict=True)) / sum(weights)
            assert getattr(merged, name) == pytest.approx(mean, abs=1e-5), name
    assert [own.pool_memory() for own in accounts] == [own.pool_memory() for own in untouched], (
        "nothing given was changed"
    )


def test_rows_of_all_pools_feed_the_lengths_and_the_baselines() -> None:
    accounts = [observed([snapshot(private=4, free=60)]) for _ in range(2)]
    accounts[0].row_finished(finished_row(0, 30, [20, 30]), GenerationParams(n=2, temperature=1.0), 4096)
    accounts[1].row_finished(finished_row(1, 10, [5]), GenerationParams(), 4096)
    merged = merge_concurrent(accounts)
    assert merged.lengths().prompt.count == 2
    assert merged.memory().contiguous.oracle.replayed == 3


def test_no_worker_has_an_empty_account() -> None:
    assert merge_concurrent([]).memory().kv_used is None
    assert merge_concurrent([merge_sequential([])]).timeline() == []


def test_timelines_side_by_side_add_up_what_stood_at_the_same_second() -> None:
    """One pool holds 10 blocks for four seconds; the other 20 for two, in one step, and is free after that."""
    long, short = Timeline(), Timeline()
    for step in range(1, 5):
        long.add(snapshot(step, private=10, free=54, step_seconds=1.0, counters=counters(step)))
    short.add(snapshot(1, private=20, free=44, step_seconds=2.0, counters=counters(6)))
    points = timeline.merge_concurrent([long, short]).points()
    assert [point.private for point in points] == [30, 30, 10, 10]
    assert [point.free for point in points] == [98, 98, 118, 118]
    assert [point.output_tokens for point in points] == [4, 8, 9, 10]
    assert [point.seconds for point in points] == [1, 2, 3, 4]


def test_the_state_of_several_engines_is_their_sum_and_the_dead_leave_their_counters() -> None:
    now = [
        snapshot(
            5, private=3, shared=2, free=5, swapped=6, running_sequences=4, counters=counters(10), step_seconds=0.5
        ),
        snapshot(
            7, private=1, cached=4, free=5, swapped=2, running_sequences=1, counters=counters(20), step_seconds=0.2
        ),
    ]
    total = sum_snapshots(now, past=[snapshot(99, private=9, counters=counters(5))])
    assert (total.pool.private, total.pool.shared, total.pool.cached, total.pool.free) == (4, 2, 4, 10)
    assert total.pool.swapped == 8
    assert (total.running_sequences, total.step, total.step_seconds) == (5, 12, 0.5)
    assert (total.counters.output_tokens, total.counters.cow_copies) == (35, 70)

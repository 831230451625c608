"""The account of memory: hand-worked steps, and the folded figures against a brute-force recount."""

from __future__ import annotations

import json
from statistics import mean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from snapshots import finished_row, snapshot

from pagedbatch.outputs import EngineCounters, PoolCounts, StepSnapshot
from pagedbatch.params import GenerationParams
from pagedbatch.stats.baselines import SequenceLengths
from pagedbatch.stats.lengths import LengthHistogram
from pagedbatch.stats.memory import MemoryAccount
from pagedbatch.stats.merge import merge_concurrent, merge_sequential
from pagedbatch.stats.sample import RowSample, sequence_lengths
from pagedbatch.stats.schema import Preemptions, PrefixCache, Time
from pagedbatch.stats.timeline import Timeline
from pagedbatch.step import StepSeconds


def account(num_blocks: int = 64, **settings: Any) -> MemoryAccount:
    return MemoryAccount(num_blocks=num_blocks, block_size=16, block_bytes=1000, **settings)


def test_eight_samples_of_a_prompt_of_four_blocks() -> None:
    """The prompt's four blocks are held once, and each sample has a tail block with one token."""
    books = account()
    books.observe(snapshot(shared=4, private=8, free=52, logical=8 * 5, filled_slots=64 + 8))
    memory = books.memory()
    assert memory.sharing_saving == pytest.approx(1 - 12 / 40)
    assert memory.kv_used == pytest.approx(72 / (12 * 16))
    assert memory.peak_live_blocks == 12
    assert memory.peak_shared_blocks == 4


def test_every_step_counts_once_and_steps_without_a_block_don_t_count_for_shares() -> None:
    books = account()
    books.observe(snapshot(private=2, shared=2, free=60, logical=10, filled_slots=32))
    books.observe(snapshot(private=10, free=54, filled_slots=160))
    books.observe(snapshot(free=64))
    memory = books.memory()
    assert memory.sharing_saving == pytest.approx((0.6 + 0.0) / 2)
    assert memory.kv_used == pytest.approx((0.5 + 1.0) / 2)
    assert memory.mean_live_blocks == pytest.approx(14 / 3)
    assert memory.mean_logical_blocks == pytest.approx(20 / 3)


def test_keys_that_stay() -> None:
    memory = account().memory().to_json()
    assert set(memory) >= {
        "num_blocks", "block_size", "block_bytes", "peak_live_blocks", "mean_live_blocks", "peak_shared_blocks",
        "sharing_saving", "kv_used", "cow_copies", "preemptions", "swapped_blocks", "recomputed_tokens",
        "prefix_cache", "contiguous",
    }  # fmt: skip
    assert set(memory["preemptions"]) == {"swap", "recompute"}
    assert set(memory["prefix_cache"]) == {"queried_tokens", "hit_tokens"}
    assert set(memory["contiguous"]) == {"max", "pow2", "oracle"}
    assert list(account().time().to_json()) == ["model", "attention", "sampling", "host", "io"]


def test_a_run_without_a_step() -> None:
    books = account()
    memory = books.memory()
    assert memory.kv_used is None
    assert memory.sharing_saving is None
    assert (memory.mean_live_blocks, memory.peak_live_blocks, memory.final_live_blocks) == (0, 0, None)
    assert books.timeline() == []
    json.dumps([each.to_json() for each in (memory, books.time(), books.lengths())], allow_nan=False)


def test_counters_are_the_latest() -> None:
    books = account()
    books.observe(snapshot(counters=EngineCounters(cow_copies=1, preemptions_swap=1)))
    books.observe(
        snapshot(
            counters=EngineCounters(
                cow_copies=5,
                preemptions_swap=2,
                preemptions_recompute=3,
                swapped_out_blocks=20,
                swapped_in_blocks=18,
                recomputed_tokens=44,
                prefix_queried_tokens=100,
                prefix_hit_tokens=64,
            )
        )
    )
    memory = books.memory()
    assert memory.cow_copies == 5
    assert memory.preemptions == Preemptions(swap=2, recompute=3)
    assert (memory.swapped_blocks, memory.swapped_bytes, memory.recomputed_tokens) == (38, 38_000, 44)
    assert memory.prefix_cache == PrefixCache(queried_tokens=100, hit_tokens=64)


def test_swapped_blocks_at_once_are_the_most_that_there_were() -> None:
    books, later, other = account(), account(), account()
    for each, counts in ((books, (3, 8, 5)), (later, (2, 9)), (other, (4,))):
        for swapped in counts:
            each.observe(snapshot(private=1, swapped=swapped))
    assert books.pool_memory().peak_swapped_blocks == 8
    books = merge_sequential([books, later])
    assert books.pool_memory().peak_swapped_blocks == 9
    books = merge_concurrent([books, other])
    assert books.pool_memory().peak_swapped_blocks == 13


def test_time_is_summed_by_kind() -> None:
    books = account()
    for _ in range(2):
        books.observe(snapshot(seconds=StepSeconds(model=1.0, attention=0.5, sampling=0.25), host_seconds=0.125))
    books.add_io(0.5)
    books.add_io(0.25)
    assert books.time() == Time(model=2.0, attention=1.0, sampling=0.5, host=0.25, io=0.75)


def test_blocks_that_are_live_after_the_run_are_reported() -> None:
    books = account()
    books.close(PoolCounts(private=2, shared=1, cached=5, free=56, logical=4, filled_slots=40))
    assert books.memory().final_live_blocks == 3


def test_finished_rows_feed_the_contiguous_baselines() -> None:
    """Memory of 64 slots: prompt 3, outputs 5 and 5 of 12 allowed. See test_baselines for the shares of one."""
    books = account(num_blocks=4)
    books.row_finished(finished_row(0, 3, [5, 5]), GenerationParams(n=2, temperature=1.0, max_tokens=12), 4096)
    books.row_finished(finished_row(1, 3, [], error="broken"), GenerationParams(num_beams=4), 4096)
    contiguous = books.memory().contiguous
    assert contiguous.max.used == pytest.approx(30 / 80)
    assert contiguous.max.mean_sequences == 2
    assert {use.replayed for use in contiguous.schemes().values()} == {2}


def test_the_sequence_budget_holds_for_the_baselines_too() -> None:
    books = account(num_blocks=64, max_num_seqs=1)
    books.row_finished(finished_row(0, 3, [5, 5]), GenerationParams(n=2, temperature=1.0), 4096)
    assert books.memory().contiguous.oracle.mean_sequences == 1


def test_beams_are_as_many_and_as_long_as_the_search() -> None:
    """Four beams ran although two came back, until the longest was done."""
    params = GenerationParams(num_beams=4, n=2, max_tokens=100)
    assert sequence_lengths(finished_row(0, 10, [3, 7]), params, 64) == [SequenceLengths(10, 7, 64)] * 4


def test_samples_end_where_they_ended() -> None:
    params = GenerationParams(n=2, temperature=1.0, max_tokens=20)
    assert sequence_lengths(finished_row(0, 10, [3, 7]), params, 4096) == [
        SequenceLengths(10, 3, 30),
        SequenceLengths(10, 7, 30),
    ]


@given(st.permutations(range(30)), st.integers(1, 40))
def test_the_sample_is_the_start_of_the_input_whatever_finishes_first(order: list[int], limit: int) -> None:
    sample = RowSample(max_sequences=limit)
    for request_id in order:
        sample.add(request_id, [SequenceLengths(request_id, 1, 10)] * 2)
    rows = max(1, min(30, limit // 2))
    assert [lengths.prompt for lengths in sample.sequences()] == [row for row in range(rows) for _ in range(2)]


def test_row_lengths() -> None:
    books = account()
    books.row_finished(finished_row(0, 4, [1, 9]), GenerationParams(n=2, temperature=1.0), 4096)
    books.row_finished(finished_row(1, 7, [8]), GenerationParams(), 4096)
    lengths = books.lengths().to_json()
    assert lengths["prompt"] == {"count": 2, "mean": 5.5, "min": 4, "max": 7, "histogram": [[4, 7, 2]]}
    assert lengths["output"] == {"count": 3, "mean": 6, "min": 1, "max": 9, "histogram": [[1, 1, 1], [8, 15, 2]]}


def test_a_length_of_zero_has_its_own_bucket() -> None:
    lengths = LengthHistogram()
    for tokens in (5, 0):
        lengths.add(tokens)
    counts = {"count": 2, "mean": 2.5, "min": 0, "max": 5, "histogram": [[0, 0, 1], [4, 7, 1]]}
    assert lengths.counts().to_json() == counts


@st.composite
def pools(draw: st.DrawFn) -> StepSnapshot:
    """A snapshot of a pool of 64 blocks in any legal state."""
    live = draw(st.integers(0, 64))
    shared = draw(st.integers(0, live))
    cached = draw(st.integers(0, 64 - live))
    return snapshot(
        private=live - shared,
        shared=shared,
        cached=cached,
        free=64 - live - cached,
        logical=live + shared * draw(st.integers(1, 7)),
        filled_slots=draw(st.integers(live, live * 16)),
        running_sequences=draw(st.integers(0, 9)),
        waiting_groups=draw(st.integers(0, 9)),
    )


@given(st.lists(pools(), min_size=1, max_size=70))
def test_folded_figures_against_a_recount(steps: list[StepSnapshot]) -> None:
    books = account()
    for each in steps:
        books.observe(each)
    memory = books.memory()
    with_live = [each.pool for each in steps if each.pool.live]
    assert memory.mean_live_blocks == pytest.approx(mean(each.pool.live for each in steps), abs=1e-6)
    assert memory.peak_live_blocks == max(each.pool.live for each in steps)
    assert memory.peak_shared_blocks == max(each.pool.shared for each in steps)
    assert memory.peak_running_sequences == max(each.running_sequences for each in steps)
    if with_live:
        saving = mean((pool.logical - pool.live) / pool.logical for pool in with_live)
        assert memory.sharing_saving == pytest.approx(saving, abs=1e-6)
        used = mean(pool.filled_slots / (16 * pool.live) for pool in with_live)
        assert memory.kv_used == pytest.approx(used, abs=1e-6)


@given(st.lists(pools(), max_size=70))
def test_timeline_is_bounded_and_loses_no_step(steps: list[StepSnapshot]) -> None:
    timeline = Timeline(max_points=8)
    for each in steps:
        timeline.add(each)
    points = timeline.points()
    assert len(points) <= 8
    assert len(points) >= min(4, len(steps)), "thinned no more than by half"
    assert sum(point.steps for point in points) == len(steps)
    assert len({point.steps for point in points[:-1]}) <= 1, "points stand for equally many steps"
    for point in points:
        assert point.private + point.shared + point.cached + point.free == pytest.approx(64, abs=0.03)
    for name in ("private", "shared", "logical", "filled_slots"):
        total = sum(getattr(point, name) * point.steps for point in points)
        assert total == pytest.approx(sum(getattr(each.pool, name) for each in steps), abs=0.006 * len(steps))


def test_a_merged_point_holds_means_and_the_latest_totals() -> None:
    timeline = Timeline(max_points=2)
    for step in range(1, 5):
        timeline.add(
            snapshot(
                step=step,
                private=10 * step,
                free=64 - 10 * step,
                running_sequences=step,
                waiting_groups=10 - step,
                step_seconds=0.5,
                counters=EngineCounters(output_tokens=100 * step, preemptions_swap=step, preemptions_recompute=1),
            )
        )
    first, second = timeline.points()
    assert (first.step, first.steps, second.step, second.steps) == (1, 2, 3, 2)
    assert (first.private, second.private) == (15, 35)
    assert (first.running, second.running) == (1.5, 3.5)
    assert (first.waiting, second.waiting) == (8.5, 6.5)
    assert (first.seconds, second.seconds) == (1.0, 2.0)
    assert (first.output_tokens, second.output_tokens) == (200, 400)
    assert (first.preemptions, second.preemptions) == (3, 5)

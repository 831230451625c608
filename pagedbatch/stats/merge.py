"""Several pools as one.

What a pool holds adds up if the pools ran at the same time. If one replaced another, or if their clocks can't be
compared, as those of shards, the highest peak counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from pagedbatch.outputs import EngineCounters, PoolCounts, StepSnapshot
from pagedbatch.stats import timeline
from pagedbatch.stats.memory import Gauges, MemoryAccount, Peaks, Sums
from pagedbatch.stats.schema import (
    Contiguous,
    ContiguousUse,
    Memory,
    Preemptions,
    PrefixCache,
    RowCounts,
    Setting,
    ShardStats,
    Stats,
    Throughput,
    Time,
)
from pagedbatch.step import StepSeconds

T = TypeVar("T")

_MEMORY_SUMS = (
    "cow_copies", "swapped_blocks", "swapped_out_blocks", "swapped_in_blocks", "swapped_bytes", "recomputed_tokens",
    "failed_steps",
)  # fmt: skip
_MEMORY_MEANS = ("mean_live_blocks", "mean_logical_blocks", "sharing_saving", "kv_used", "mean_running_sequences")
_MEMORY_MAXIMA = (
    "num_blocks", "peak_live_blocks", "peak_shared_blocks", "peak_running_sequences", "peak_swapped_blocks",
)  # fmt: skip
_USE_MEANS = ("used", "reserved", "internal", "external", "mean_sequences", "room")


def merge_sequential(accounts: Sequence[MemoryAccount]) -> MemoryAccount:
    """One account of pools each of which replaced the one before it. Each began with nothing."""
    if len(accounts) == 1:
        return accounts[0]
    merged = _add_up(accounts)
    merged.gauges = _combine(Gauges, sum, [each.gauges for each in accounts])
    merged.peaks = _combine(Peaks, max, [each.peaks for each in accounts])
    if accounts:
        merged.final_live = accounts[-1].final_live
    merged.steps = timeline.merge_sequential([each.steps for each in accounts])
    return merged


def merge_concurrent(accounts: Sequence[MemoryAccount]) -> MemoryAccount:
    """One account of pools that ran at the same time, as if all were one pool.

    Means of blocks and sequences add up. So do peaks, which need not have come at the same moment: the result is an
    upper bound. The shares, KV used and sharing saving, are means over the steps of all.
    """
    accounts = [each for each in accounts if each.num_blocks]
    if len(accounts) == 1:
        return accounts[0]
    merged = _add_up(accounts)
    merged.num_blocks = sum(each.num_blocks for each in accounts)
    caps = [each.max_num_seqs for each in accounts if each.max_num_seqs is not None]
    merged.max_num_seqs = sum(caps) if caps else None
    for field in fields(Gauges):
        means = (getattr(each.gauges, field.name) / each.sums.steps for each in accounts if each.sums.steps)
        setattr(merged.gauges, field.name, sum(means) * merged.sums.steps)
    merged.peaks = _combine(Peaks, sum, [each.peaks for each in accounts])
    if accounts:
        merged.final_live = sum(each.final_live or 0 for each in accounts)
    merged.steps = timeline.merge_concurrent([each.steps for each in accounts])
    return merged


def _add_up(accounts: Sequence[MemoryAccount]) -> MemoryAccount:
    """An account in the first one's pool with what adds up whenever the others ran; of no pool if there are none."""
    if not accounts:
        return MemoryAccount(num_blocks=0, block_size=1, block_bytes=0)
    first = accounts[0]
    merged = MemoryAccount(
        num_blocks=first.num_blocks,
        block_size=first.block_size,
        block_bytes=first.block_bytes,
        max_num_seqs=first.max_num_seqs,
    )
    merged.sums = _combine(Sums, sum, [each.sums for each in accounts])
    merged.counters = _combine(EngineCounters, sum, [each.counters for each in accounts])
    maps = [each.peak_map for each in accounts if each.peak_map is not None]
    merged.peak_map = max(maps, key=lambda block_map: block_map.live_blocks, default=None)
    for each in accounts:
        merged.sample.merge(each.sample)
        merged.prompts.merge(each.prompts)
        merged.outputs.merge(each.outputs)
    return merged


def sum_snapshots(current: Sequence[StepSnapshot], past: Sequence[StepSnapshot]) -> StepSnapshot:
    """The state of several engines as one. Of those in `past`, which are gone, only the counters count."""
    return StepSnapshot(
        step=sum(each.step for each in current),
        pool=_combine(PoolCounts, sum, [each.pool for each in current]),
        counters=_combine(EngineCounters, sum, [each.counters for each in (*current, *past)]),
        running_groups=sum(each.running_groups for each in current),
        running_sequences=sum(each.running_sequences for each in current),
        waiting_groups=sum(each.waiting_groups for each in current),
        num_tokens=sum(each.num_tokens for each in current),
        seconds=_combine(StepSeconds, sum, [each.seconds for each in current]),
        host_seconds=sum(each.host_seconds for each in current),
        step_seconds=max(each.step_seconds for each in current),
    )


def _combine(kind: type[T], function: Callable[[list[Any]], Any], records: Sequence[T]) -> T:
    """`function` of each field over all records; a new record if there are none."""
    if not records:
        return kind()
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: function([getattr(each, name) for each in records]) for name in names})


def merge_shards(shards: Mapping[str, Stats], output: str) -> Stats:
    """The stats of the whole run; `shards` has those of each shard by its file.

    Tokens and times are sums, so that tokens per second are those of one shard at a time. Each shard had a pool of its
    own: peaks are those of the highest, means and shares weigh each shard by its steps.
    """
    parts = list(shards.values())
    speeds = [part.throughput for part in parts]
    return Stats(
        settings=_common_settings(parts) | {"output": Setting(value=output, source="command line")},
        versions=_joined_versions(parts),
        rows=_sum_up(RowCounts, [part.rows for part in parts]),
        throughput=Throughput.of(
            startup_seconds=sum(each.startup_seconds for each in speeds),
            seconds=sum(each.seconds for each in speeds),
            longest_shard_seconds=max(each.startup_seconds + each.seconds for each in speeds),
            prompt_tokens=sum(each.prompt_tokens for each in speeds),
            output_tokens=sum(each.output_tokens for each in speeds),
        ),
        memory=_merge_memory(parts),
        time=_sum_up(Time, [part.time for part in parts]),
        timeline=[],
        shards=[ShardStats(file=name, stats=stats) for name, stats in shards.items()],
    )


def _common_settings(parts: Sequence[Stats]) -> dict[str, Setting]:
    """Those that all shards had alike; the others are in each shard's own stats."""
    first = parts[0].settings
    return {name: entry for name, entry in first.items() if all(part.settings.get(name) == entry for part in parts)}


def _joined_versions(parts: Sequence[Stats]) -> dict[str, str]:
    found: dict[str, dict[str, None]] = {}
    for part in parts:
        for name, version in part.versions.items():
            found.setdefault(name, {})[version] = None
    return {name: " and ".join(versions) for name, versions in found.items()}


def _merge_memory(parts: Sequence[Stats]) -> Memory | None:
    """None where blocks differ in size."""
    memories = [part.memory for part in parts if part.memory is not None]
    first = memories[0]
    if {(each.block_size, each.block_bytes) for each in memories} != {(first.block_size, first.block_bytes)}:
        return None
    steps = [sum(point.steps for point in part.timeline) for part in parts]

    def values(name: str) -> list[Any]:
        return [getattr(each, name) for each in memories]

    return Memory(
        block_size=first.block_size,
        block_bytes=first.block_bytes,
        **{name: max(values(name)) for name in _MEMORY_MAXIMA},
        **{name: _mean(values(name), steps) for name in _MEMORY_MEANS},
        **{name: sum(values(name)) for name in _MEMORY_SUMS},
        final_live_blocks=sum(each.final_live_blocks or 0 for each in memories),
        preemptions=_sum_up(Preemptions, values("preemptions")),
        prefix_cache=_sum_up(PrefixCache, values("prefix_cache")),
        contiguous=Contiguous(
            **{name: _merge_uses([getattr(each.contiguous, name) for each in memories], steps)
               for name in Contiguous.names()}
        ),
    )  # fmt: skip


def _sum_up(kind: type[T], records: Sequence[T]) -> T:
    """Sums of counts, and of seconds as the stats round them."""
    return _combine(kind, lambda values: round(sum(values), 4), records)


def _mean(values: Sequence[float | None], weights: Sequence[int]) -> Any:
    """Of the values that are not None. None if there are none."""
    known = [(value, weight) for value, weight in zip(values, weights, strict=True) if value is not None]
    total = sum(weight for _, weight in known)
    if not total:
        return known[0][0] if known else None
    return round(sum(value * weight for value, weight in known) / total, 6)


def _merge_uses(uses: Sequence[ContiguousUse], steps: Sequence[int]) -> ContiguousUse:
    """Shares of shards that had no sequence to replay don't count."""
    weights = [weight if use.replayed else 0 for use, weight in zip(uses, steps, strict=True)]
    return ContiguousUse(
        **{name: _mean([getattr(use, name) for use in uses], weights) for name in _USE_MEANS},
        replayed=sum(use.replayed for use in uses),
        refused=sum(use.refused for use in uses),
    )

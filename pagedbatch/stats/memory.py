"""The account of one run: folds step snapshots and finished rows into the figures of OUT.stats.json.

A step costs a few additions, whatever the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pagedbatch.outputs import BlockMap, EngineCounters, PoolCounts, RequestOutput, StepSnapshot
from pagedbatch.params import GenerationParams
from pagedbatch.stats.baselines import compare
from pagedbatch.stats.lengths import LengthHistogram
from pagedbatch.stats.sample import RowSample, sequence_lengths
from pagedbatch.stats.schema import (
    Contiguous,
    HeldBlocks,
    Lengths,
    Memory,
    PeakMap,
    PoolMemory,
    Preemptions,
    PrefixCache,
    Time,
    TimelinePoint,
)
from pagedbatch.stats.timeline import Timeline


@dataclass(slots=True)
class Sums:
    """What adds up over steps, and over pools whenever they ran. Times are in seconds."""

    steps: int = 0
    steps_with_live: int = 0
    saving: float = 0.0
    kv_used: float = 0.0
    model: float = 0.0
    attention: float = 0.0
    sampling: float = 0.0
    swap: float = 0.0
    host: float = 0.0
    io: float = 0.0


@dataclass(slots=True)
class Gauges:
    """Sums over the steps of what a step had at once."""

    live: float = 0.0
    logical: float = 0.0
    running: float = 0.0


@dataclass(slots=True)
class Peaks:
    """Maxima over the steps of what a step had at once."""

    live: int = 0
    shared: int = 0
    running: int = 0
    swapped: int = 0


@dataclass(slots=True, kw_only=True)
class MemoryAccount:
    """What the run's KV pool held, step by step.

    `block_bytes` is the size of one block over all layers, K and V. `max_num_seqs` caps the contiguous baselines as it
    caps the run. Averages count every step once: sharing saving is the mean of 1 - live / logical blocks, KV used the
    mean of filled slots / slots of live blocks, each over the steps that had a live block (PagedAttention, arXiv
    2309.06180, sections 2.2 and 6.3).

    The fields that are not parameters are what the functions of `stats.merge` put together.
    """

    num_blocks: int
    block_size: int
    block_bytes: int
    max_num_seqs: int | None = None
    sums: Sums = field(default_factory=Sums, init=False)
    gauges: Gauges = field(default_factory=Gauges, init=False)
    peaks: Peaks = field(default_factory=Peaks, init=False)
    counters: EngineCounters = field(default_factory=EngineCounters, init=False)
    final_live: int | None = field(default=None, init=False)
    peak_map: BlockMap | None = field(default=None, init=False)
    steps: Timeline = field(default_factory=Timeline, init=False)
    sample: RowSample = field(default_factory=RowSample, init=False)
    prompts: LengthHistogram = field(default_factory=LengthHistogram, init=False)
    outputs: LengthHistogram = field(default_factory=LengthHistogram, init=False)

    def observe(self, snapshot: StepSnapshot) -> None:
        """Adds a step, right after it ran."""
        pool, sums, gauges, peaks = snapshot.pool, self.sums, self.gauges, self.peaks
        live = pool.live
        sums.steps += 1
        gauges.live += live
        gauges.logical += pool.logical
        gauges.running += snapshot.running_sequences
        if live:
            sums.steps_with_live += 1
            sums.saving += 1 - live / pool.logical
            sums.kv_used += pool.filled_slots / (live * self.block_size)
        peaks.live = max(peaks.live, live)
        peaks.shared = max(peaks.shared, pool.shared)
        peaks.running = max(peaks.running, snapshot.running_sequences)
        peaks.swapped = max(peaks.swapped, pool.swapped)
        seconds = snapshot.seconds
        sums.model += seconds.model
        sums.attention += seconds.attention
        sums.sampling += seconds.sampling
        sums.swap += seconds.swap
        sums.host += snapshot.host_seconds
        if snapshot.block_map is not None:
            self.peak_map = snapshot.block_map
        self.counters = snapshot.counters
        self.steps.add(snapshot)

    def row_finished(self, output: RequestOutput, params: GenerationParams, max_model_len: int) -> None:
        """Adds a row that this run finished. Error rows have no sequences and leave no trace."""
        sequences = sequence_lengths(output, params, max_model_len)
        if not sequences:
            return
        self.sample.add(output.request_id, sequences)
        self.prompts.add(output.num_prompt_tokens)
        for completion in output.outputs:
            self.outputs.add(len(completion.token_ids))

    def add_io(self, seconds: float) -> None:
        """Adds time spent reading rows and writing records."""
        self.sums.io += seconds

    def close(self, pool: PoolCounts) -> None:
        """Takes the pool after the last row: a block still live then was leaked."""
        self.final_live = pool.live

    def memory(self) -> Memory:
        """The section `memory` of the stats."""
        pool = self.pool_memory()
        contiguous = compare(self.sample.sequences(), self.num_blocks * self.block_size, self.max_num_seqs)
        return Memory(
            **{name: getattr(pool, name) for name in PoolMemory.names()},
            contiguous=Contiguous(**{name: use.rounded() for name, use in contiguous.schemes().items()}),
            peak_map=None if self.peak_map is None else _peak_map(self.peak_map),
        )

    def pool_memory(self) -> PoolMemory:
        """`memory` without the contiguous baselines and the map."""
        counters, sums, gauges, peaks = self.counters, self.sums, self.gauges, self.peaks
        swapped_blocks = counters.swapped_out_blocks + counters.swapped_in_blocks
        return PoolMemory(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            block_bytes=self.block_bytes,
            peak_live_blocks=peaks.live,
            mean_live_blocks=_mean(gauges.live, sums.steps) or 0.0,
            mean_logical_blocks=_mean(gauges.logical, sums.steps) or 0.0,
            final_live_blocks=self.final_live,
            peak_shared_blocks=peaks.shared,
            sharing_saving=_mean(sums.saving, sums.steps_with_live),
            kv_used=_mean(sums.kv_used, sums.steps_with_live),
            mean_running_sequences=_mean(gauges.running, sums.steps) or 0.0,
            peak_running_sequences=peaks.running,
            cow_copies=counters.cow_copies,
            preemptions=Preemptions(swap=counters.preemptions_swap, recompute=counters.preemptions_recompute),
            swapped_blocks=swapped_blocks,
            peak_swapped_blocks=peaks.swapped,
            swapped_out_blocks=counters.swapped_out_blocks,
            swapped_in_blocks=counters.swapped_in_blocks,
            swapped_bytes=swapped_blocks * self.block_bytes,
            swap_seconds=round(sums.swap, 4),
            recomputed_tokens=counters.recomputed_tokens,
            failed_steps=counters.failed_steps,
            prefix_cache=PrefixCache(
                queried_tokens=counters.prefix_queried_tokens, hit_tokens=counters.prefix_hit_tokens
            ),
        )

    def time(self) -> Time:
        sums = self.sums
        return Time(**{name: round(getattr(sums, name), 4) for name in Time.names()})

    def timeline(self) -> list[TimelinePoint]:
        return self.steps.points()

    def lengths(self) -> Lengths:
        return Lengths(prompt=self.prompts.counts(), output=self.outputs.counts())


def _mean(total: float, count: int) -> float | None:
    return round(total / count, 6) if count else None


def _peak_map(block_map: BlockMap) -> PeakMap:
    return PeakMap(
        live_blocks=block_map.live_blocks,
        num_sequences=block_map.num_sequences,
        held=[
            HeldBlocks(row=held.request_id, num_blocks=held.num_blocks, runs=[(first, n) for first, n in held.runs])
            for held in block_map.held
        ],
    )

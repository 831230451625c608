"""The records of OUT.stats.json, which is read and written only through them. docs/stats.md is made from this file."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pagedbatch.stats.record import Number, Record, RecordError, key

Rows = Annotated[int, Number("rows")]
RowNumber = Annotated[int, Number("row number")]
Sequences = Annotated[int, Number("sequences")]
MeanSequences = Annotated[float, Number("sequences")]
Tokens = Annotated[int, Number("tokens")]
Steps = Annotated[int, Number("steps")]
Blocks = Annotated[int, Number("blocks")]
MeanBlocks = Annotated[float, Number("blocks")]
Bytes = Annotated[int, Number("bytes")]
Seconds = Annotated[float, Number("seconds")]
Share = Annotated[float, Number("share, 0 to 1", maximum=1)]
Count = Annotated[int, Number("count")]

#: Where a contiguous system's memory goes, in the order of the paper's figure 2. They add up to 1.
KV_SHARES = ("used", "reserved", "internal", "external")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting(Record):
    """A setting of the run."""

    value: Any = key("as it was given, or the default")
    source: str = key("where it comes from: `command line`, `recipe`, `model` (its generation_config) or `default`")
    used: Any = key("what the value stood for in this run, of a setting such as `auto`", optional=True)

    def text(self, *, ascii_only: bool = False) -> str:
        """The value as JSON, followed by what an `auto` stood for."""
        text = json.dumps(self.value, ensure_ascii=ascii_only)
        if self.used is not None and self.used != self.value:
            text += f": {json.dumps(self.used, ensure_ascii=ascii_only)}"
        return text


Settings = dict[str, Setting]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCounts(Record):
    """Rows of the input, or of the shard. Those that an earlier run had finished are included."""

    total: Rows = key("all rows")
    ok: Rows = key("rows with an answer")
    error: Rows = key("rows whose record is an error")
    resumed: Rows = key("rows that the journal held when the run started")


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput(Record):
    """Speed. Of a resumed run, tokens and times are those since it was resumed."""

    startup_seconds: Seconds = key("from the start of the run to the first step; merged: the sum over the shards")
    seconds: Seconds = key("from the first step to the last finished row; merged: the sum over the shards")
    steps: Steps | None = key("engine steps; simulations only", optional=True)
    longest_shard_seconds: Seconds | None = key(
        "start-up and run of the slowest shard: what the run takes if all shards run at once; merged only",
        optional=True,
    )
    prompt_tokens: Tokens = key("prompt tokens of finished rows", default=0)
    output_tokens: Tokens = key("generated tokens of finished rows")
    output_tokens_per_second: Annotated[float, Number("tokens/second")] = key("`output_tokens / seconds`")

    @classmethod
    def of(cls, *, startup_seconds: float, seconds: float, output_tokens: int, **others: Any) -> Throughput:
        """Rounds the times and computes the speed; `others` are further keys."""
        return cls(
            startup_seconds=round(startup_seconds, 4),
            seconds=round(seconds, 4),
            output_tokens=output_tokens,
            output_tokens_per_second=round(output_tokens / seconds, 3) if seconds else 0.0,
            **others,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemptions(Record):
    """Groups whose blocks were taken away because the pool was full."""

    swap: Count = key("by moving their blocks to host memory")
    recompute: Count = key("by dropping their blocks, to be computed again")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCache(Record):
    """Prompt tokens whose K and V were already in the pool."""

    queried_tokens: Tokens = key("prompt tokens that were looked up; 0 if the cache is off")
    hit_tokens: Tokens = key("those that were found")


@dataclass(frozen=True, slots=True, kw_only=True)
class ContiguousUse(Record):
    """Where the memory of a contiguous system would have gone: shares of token slots over time, which add up to 1."""

    used: Share = key("held a token")
    reserved: Share = key("held a token later, before the sequence ended")
    internal: Share = key("reserved, and never held a token")
    external: Share = key("lost to the allocator, between reservations")
    mean_sequences: MeanSequences = key("sequences that ran at once, on average over steps")
    room: MeanSequences | None = key("sequences that the memory holds if nothing else limits them", optional=True)
    replayed: Sequences = key("sequences that were replayed")
    refused: Sequences = key("sequences that need a larger chunk than this memory has")

    @property
    def num_sequences(self) -> int:
        return self.replayed + self.refused

    def rounded(self) -> ContiguousUse:
        return replace(self, **{name: round(getattr(self, name), 6) for name in self.names()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Contiguous(Record):
    """The first rows of the run replayed in the same memory, each sequence in one contiguous region. The schemes differ
    in what a sequence reserves when it starts (PagedAttention, arXiv 2309.06180, figure 2)."""

    max: ContiguousUse = key("its limit: prompt and max_tokens")
    pow2: ContiguousUse = key("its prompt, and its output length rounded up to a power of two")
    oracle: ContiguousUse = key("its exact final length")

    def schemes(self) -> dict[str, ContiguousUse]:
        """All three by name, in the order of the paper's figure 2."""
        return {"max": self.max, "pow2": self.pow2, "oracle": self.oracle}

    @property
    def num_sequences(self) -> int:
        """Sequences that were replayed, or refused by a scheme."""
        return max(use.num_sequences for use in self.schemes().values())


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBlocks(Record):
    """The block table of one sequence."""

    row: RowNumber = key("its row")
    num_blocks: Blocks = key("length of its table")
    runs: list[tuple[Annotated[int, Number(minimum=-1)], Annotated[int, Number(minimum=1, maximum=512)]]] = key(
        "its beginning as runs `[first number, length]`; equal numbers are one block, -1 marks dropped blocks"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMap(Record):
    """Who held which blocks when the pool was fullest, or within a tenth of it."""

    live_blocks: Blocks = key("blocks that were live", default=0)
    num_sequences: Sequences = key("sequences that were running")
    held: list[HeldBlocks] = key("the first of them, those of a row side by side")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMemory(Record):
    """The pool over the run. Means count every step once.

    With workers, blocks, means and peaks are sums over the workers, although peaks need not have come at the same
    moment. In merged stats, a peak is that of the highest shard, and means weigh each shard by its steps.
    """

    num_blocks: Blocks = key("size of the pool")
    block_size: Annotated[int, Number("tokens", minimum=1)] = key("token slots of a block")
    block_bytes: Bytes = key("size of a block over all layers, K and V")
    peak_live_blocks: Blocks = key("maximum of live blocks; a live block is in the table of at least one sequence")
    mean_live_blocks: MeanBlocks = key("live blocks on average")
    mean_logical_blocks: MeanBlocks = key("summed length of all block tables on average: live blocks without sharing")
    final_live_blocks: Blocks | None = key(
        "live blocks after the last row: if not 0, they were leaked; null if unknown", default=None
    )
    peak_shared_blocks: Blocks = key("maximum of blocks in the tables of two or more sequences", default=0)
    sharing_saving: Share | None = key("mean of `1 - live / logical` over the steps with a live block; null: none had")
    kv_used: Share | None = key(
        "mean of `filled slots / slots of live blocks` over the steps with a live block; null: none had"
    )
    mean_running_sequences: MeanSequences = key("sequences that ran at once, on average")
    peak_running_sequences: Sequences = key("maximum of sequences that ran at once", default=0)
    cow_copies: Blocks = key("blocks that were copied on write")
    preemptions: Preemptions = key("groups that lost their blocks for a while")
    swapped_blocks: Blocks = key("blocks moved to host memory and blocks moved back, together")
    peak_swapped_blocks: Blocks = key("maximum of blocks that were in host memory at once", default=0)
    swapped_out_blocks: Blocks = key("blocks moved to host memory", default=0)
    swapped_in_blocks: Blocks = key("blocks moved back", default=0)
    swapped_bytes: Bytes = key("`swapped_blocks * block_bytes`", default=0)
    swap_seconds: Seconds | None = key("time of the moves, a part of `time.model`; not in merged stats", optional=True)
    recomputed_tokens: Tokens = key("tokens computed again after a preemption")
    failed_steps: Steps = key("steps that failed, were taken back and tried again row by row", default=0)
    prefix_cache: PrefixCache = key("prompt tokens found in the pool")

    def check(self, dot: str) -> None:
        if self.kv_used is not None and not (self.num_blocks and self.mean_live_blocks):
            raise RecordError(f"{dot}kv_used is a share of no blocks")

    @property
    def pool_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def mean_saved_blocks(self) -> float:
        """Blocks that sharing saved, on average."""
        return max(0.0, self.mean_logical_blocks - self.mean_live_blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory(PoolMemory):
    """The pool of the run, and what contiguous allocation would have taken in its place."""

    contiguous: Contiguous = key("what contiguous allocation would have held for the same rows")
    peak_map: PeakMap | None = key(
        "the tables of the fullest step; null in merged stats and if no step held a block", default=None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Time(Record):
    """Where the time of the steps went; with workers and in merged stats, sums over them."""

    model: Seconds = key("forward pass without attention, and moving swapped blocks", default=0.0)
    attention: Seconds = key("attention", default=0.0)
    sampling: Seconds = key("choosing tokens and ranking beams", default=0.0)
    host: Seconds = key("scheduling and bookkeeping", default=0.0)
    io: Seconds = key("reading rows and writing records", default=0.0)

    @property
    def total(self) -> float:
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Seconds by name."""
        return self.to_json()


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelinePoint(Record):
    """Some steps of the run, equally many in every point but the last. Blocks, slots, sequences and rows are means."""

    step: Annotated[int, Number("step number")] = key("its first step, from 1", default=1)
    steps: Steps = key("number of steps in it")
    seconds: Seconds = key("step time of the run up to its end")
    private: MeanBlocks = key("live blocks in the table of one sequence")
    shared: MeanBlocks = key("live blocks in the tables of two or more")
    cached: MeanBlocks = key("blocks in no table whose contents can still be reused")
    free: MeanBlocks = key("all other blocks")
    logical: MeanBlocks = key("summed length of all block tables")
    filled_slots: Annotated[float, Number("tokens")] = key("slots of live blocks that hold a token")
    running: MeanSequences = key("sequences that run")
    waiting: Annotated[float, Number("rows")] = key("rows that wait to run")
    output_tokens: Tokens = key("generated tokens since the start")
    preemptions: Count = key("preemptions since the start", default=0)

    def check(self, dot: str) -> None:
        if self.logical < self.live:
            raise RecordError(f"{dot}logical is less than its blocks")

    @property
    def live(self) -> float:
        return self.private + self.shared

    @property
    def sharing_saving(self) -> float:
        """Share of the blocks in tables that sharing saves; 0 without blocks."""
        return 1 - self.live / self.logical if self.live else 0.0

    def kv_used(self, block_size: int) -> float:
        """Share of the slots of live blocks that hold a token; 0 without blocks."""
        return self.filled_slots / (self.live * block_size) if self.live else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthCounts(Record):
    """Token counts of texts."""

    count: Count = key("texts")
    mean: Annotated[float, Number("tokens")] | None = key("mean length; null if there are none, like the next two")
    min: Tokens | None = key("shortest")
    max: Tokens | None = key("longest")
    histogram: list[tuple[Tokens, Tokens, Count]] = key(
        "texts by length, in powers of two: `[minimum tokens, maximum tokens, texts]`, ascending, empty ones left out"
    )

    def check(self, dot: str) -> None:
        if bool(self.count) != bool(self.histogram):
            raise RecordError(f"{dot}histogram does not fit its count")
        if self.count and None in (self.min, self.max, self.mean):
            raise RecordError(f"{dot.removesuffix('.')} has a count and no range")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths(Record):
    """Lengths of the rows that this run finished, without those that were resumed."""

    prompt: LengthCounts = key("prompts")
    output: LengthCounts = key("outputs; a row may have several")


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker(Record):
    """A worker process of a run with `--workers`."""

    node: str = key("address of its machine")
    rows: Rows = key("rows that it finished")
    restarts: Count = key("how often it was started again after it had died")
    rows_again: Rows = key("rows that were run again because it had died")
    memory: PoolMemory = key("its pool")
    time: Time = key("where its time went")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardInput(Record):
    """What the rows come from."""

    name: str = key("as it was given")
    size: Bytes = key("its size")
    hash: str = key("hash of its content")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity(Record):
    """The model that answers. Only the fingerprint counts."""

    name: str = key("as it was given")
    fingerprint: str = key("changes with its files")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardInfo(Record):
    """What `pagedbatch merge` needs to know of a run with `--shard`."""

    shard: str = key("`I/N` as given")
    first_row: RowNumber = key("its first row in the input, from 0")
    num_rows: Rows = key("its rows")
    of_rows: Rows = key("rows of the whole input")
    input: ShardInput = key("the input of all shards")
    model: ModelIdentity = key("the model of all shards")
    settings: dict[str, Any] = key("settings on which the results depend; all shards must have the same")

    @property
    def rows(self) -> range:
        return range(self.first_row, self.first_row + self.num_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats(Record):
    """OUT.stats.json."""

    simulated: bool = key("true: made by `pagedbatch simulate`, no model ran", default=False, optional=True)
    settings: Settings = key("every setting by name; merged: those that all shards had alike")
    versions: dict[str, str] = key("versions of pagedbatch, Python and the libraries that results depend on")
    rows: RowCounts = key("how many rows there are, and how they ended")
    throughput: Throughput = key("speed")
    memory: Memory | None = key("the KV pool; null in merged stats of shards whose blocks differ in size")
    time: Time = key("where time went")
    lengths: Lengths | None = key("lengths of prompts and outputs; not in merged stats", optional=True)
    timeline: list[TimelinePoint] = key("the run over time in at most 512 points; empty in merged stats")
    workers: list[Worker] | None = key("an entry for each worker, of a run with `--workers`", optional=True)
    shard: ShardInfo | None = key("which part this is, of a run with `--shard`", optional=True)
    shards: list[ShardStats] | None = key("the stats of the merged shards", optional=True)

    def check(self, dot: str) -> None:
        if self.simulated and self.throughput.steps is None:
            raise RecordError(f"{dot}throughput.steps is missing")
        if self.memory is None and not self.shards:
            raise RecordError(f"{dot}shards is missing")
        if self.memory is None and self.shard is not None:
            raise RecordError(f"{dot}memory is missing")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardStats(Record):
    """One shard of a merged run."""

    file: str = key("its output file, as given to `pagedbatch merge`")
    stats: Stats = key("its own stats")

    def check(self, dot: str) -> None:
        if self.stats.memory is None:
            raise RecordError(f"{dot}stats.memory is missing")

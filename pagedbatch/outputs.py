"""What the engine gives to whoever runs it: finished requests, and snapshots of its state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pagedbatch.step import PromptScores, StepSeconds, TopLogprobs


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One finished output of a request. `top_logprobs` is None unless the request asked for logprobs."""

    index: int
    token_ids: list[int]
    token_logprobs: list[float]
    cumulative_logprob: float
    finish_reason: str
    stop_reason: str | int | None
    score: float | None = None
    top_logprobs: list[TopLogprobs] | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request: its outputs, or an error that says why there are none.

    `prompt_scores` is None unless the request asked for them.
    """

    request_id: int
    outputs: list[CompletionOutput]
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    prompt_scores: PromptScores | None = None
    error: str | None = None

    @property
    def num_output_tokens(self) -> int:
        return sum(len(output.token_ids) for output in self.outputs)


#: Every block of a pool is in exactly one of these states; in the order in which they are shown.
BLOCK_STATES = ("private", "shared", "cached", "free")


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Blocks by state (`BLOCK_STATES`), which add up to the pool. `filled_slots` lie in live blocks.

    `logical` is the summed length of all block tables: what the live blocks would be without sharing. `swapped` are
    blocks of the host pool, beside this one, that preempted groups hold.
    """

    private: int
    shared: int
    cached: int
    free: int
    logical: int
    filled_slots: int
    swapped: int = 0

    @property
    def live(self) -> int:
        return self.private + self.shared

    @property
    def by_state(self) -> dict[str, int]:
        return {state: getattr(self, state) for state in BLOCK_STATES}


class BlockRun(NamedTuple):
    """`length` blocks in a row, numbered from `first` on; -1: they were dropped."""

    first: int
    length: int


@dataclass(frozen=True, slots=True)
class HeldBlocks:
    """A sequence's block table, its beginning alone where it is long; `num_blocks` counts all of it."""

    request_id: int
    runs: list[BlockRun]
    num_blocks: int


@dataclass(frozen=True, slots=True)
class BlockMap:
    """Who held which blocks: the first of `num_sequences` running sequences, siblings beside each other.

    Blocks are numbered in the order in which they are met, so that those with one number are one block.
    """

    live_blocks: int
    num_sequences: int
    held: list[HeldBlocks]


@dataclass(slots=True)
class EngineCounters:
    """Totals since the start of the run. The scheduler counts in its own; a snapshot carries a copy."""

    cow_copies: int = 0
    preemptions_swap: int = 0
    preemptions_recompute: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    recomputed_tokens: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    failed_steps: int = 0


@dataclass(frozen=True, slots=True)
class StepSnapshot:
    """The engine right after a step was scheduled, and what the step cost. Read by the account and the display.

    `block_map` comes only with a step that held clearly more blocks than any before it.
    """

    step: int
    pool: PoolCounts
    counters: EngineCounters
    running_groups: int
    running_sequences: int
    waiting_groups: int
    num_tokens: int
    seconds: StepSeconds
    host_seconds: float
    step_seconds: float
    block_map: BlockMap | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What `Engine.step` gives back: rows that finished in it, and the state for the account."""

    finished: Sequence[RequestOutput] = field(default_factory=list)
    snapshot: StepSnapshot | None = None

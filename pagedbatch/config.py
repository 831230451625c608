"""Settings of the engine, fixed for a run. Plain data; values come checked from the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PreemptionMode = Literal["auto", "swap", "recompute"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the scheduler and the pool need to know.

    `num_blocks` and `num_swap_blocks` are the sizes of the device pool and of the host pool, in blocks of `block_size`
    token slots. `max_model_len` is the maximum number of tokens of a sequence, prompt included.
    """

    num_blocks: int
    block_size: int = 16
    num_swap_blocks: int = 0
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    max_num_scored_tokens: int = 1024
    """Most prompt positions a step that are scored: each takes logits of the size of the vocabulary."""
    max_model_len: int = 4096
    window: int | None = None
    """The largest attention window in tokens, where every layer has one: blocks that left it are given back."""
    preemption: PreemptionMode = "auto"
    prefix_cache: bool = True
    eos_token_ids: frozenset[int] = frozenset()
    vocab_size: int | None = None
    """Logits of a position; None: not known, and not counted among what beams need."""
    host_memory: int | None = None
    """Bytes of memory beside the pool that a single row may need; None: any."""
    check_invariants: bool = False
    """Check after each step that no shared block was written and that no block was lost. For tests and bug hunts."""

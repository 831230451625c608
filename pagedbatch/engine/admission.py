"""Whether a row can ever run: what it holds at its largest, against the pool. Knows no queue and no step."""

from __future__ import annotations

from enum import Enum, auto

from pagedbatch.config import EngineConfig
from pagedbatch.params import GenerationParams
from pagedbatch.sequence import Request, SequenceGroup


class Admission(Enum):
    """OK: start it now. LATER: when others have given blocks back. NEVER: it can't fit even alone."""

    OK = auto()
    LATER = auto()
    NEVER = auto()


def max_width(config: EngineConfig, params: GenerationParams) -> int:
    """The most sequences of a request at once. Beams are ranked against each other and must all run; samples can take
    turns."""
    if params.max_tokens == 0:
        return 1
    if params.use_beam_search:
        return params.num_beams
    return min(params.num_samples, config.max_num_seqs, config.max_num_batched_tokens)


def refusal(config: EngineConfig, request: Request) -> str | None:
    """Why a request can never run, known before it is queued; None: it can."""
    group = SequenceGroup(request, arrival=0, max_width=max_width(config, request.params))
    if request.computes_nothing or blocks_at_most(config, group) <= config.num_blocks:
        return None
    return never_message(config, group)


def blocks_at_most(config: EngineConfig, group: SequenceGroup) -> int:
    """Blocks that a group holds at its largest: full prompt blocks once, then a tail of each sequence.

    The last generated token is never computed, so its K/V take no slot. With a window, no more of the prompt is
    held than the window before a step's tokens and those, and no more of a tail than the window.
    """
    size = config.block_size
    num_prompt = len(group.prompt_token_ids)
    num_stored = num_prompt + group.params.max_tokens - 1
    num_shared = num_prompt // size
    num_tail = -(-num_stored // size) - num_shared
    if config.window is not None:
        num_shared = min(num_shared, (config.window + config.max_num_batched_tokens) // size + 2)
        num_tail = min(num_tail, config.window // size + 2)
    return num_shared + group.max_width * num_tail


def never_message(config: EngineConfig, group: SequenceGroup) -> str:
    """Why a row can never run, with the blocks needed and those there are, and what to change."""
    params = group.params
    kind = f"{params.num_beams} beams" if params.use_beam_search else f"n {params.num_samples}"
    if group.max_width < params.width:
        kind += f", {group.max_width} at once"
    return (
        f"needs {blocks_at_most(config, group)} KV blocks of {config.block_size} tokens (prompt "
        f"{len(group.prompt_token_ids)} + max_tokens {params.max_tokens}, {kind}), but the pool has "
        f"{config.num_blocks}: raise --kv-memory or --num-blocks, or lower max_tokens"
    )

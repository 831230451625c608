"""Whether a request can ever run: the maximum of blocks and memory that it needs, against what there is."""

from __future__ import annotations

from enum import Enum, auto

from pagedbatch.config import EngineConfig
from pagedbatch.engine.beam_search import num_candidates
from pagedbatch.params import GenerationParams
from pagedbatch.sequence import Request, SequenceGroup

_GIB = 2**30
#: What each takes in Python and once more as the text of a record, rounded up.
_SEQUENCE_BYTES, _TOKEN_BYTES, _LOGPROB_BYTES, _CANDIDATE_BYTES = 1000, 200, 700, 200
#: A logit in float32, beside it a copy that controls change and one that is ranked.
_SCORE_BYTES = 12


class Admission(Enum):
    """OK: start it now. LATER: when others have given blocks back. NEVER: it can't fit even alone."""

    OK = auto()
    LATER = auto()
    NEVER = auto()


def max_width(config: EngineConfig, params: GenerationParams) -> int:
    """Maximum number of sequences of a request at once. All beams must run together, to be ranked against each other;
    samples can take turns."""
    if params.max_tokens == 0:
        return 1
    if params.use_beam_search:
        return params.num_beams
    return min(params.num_samples, config.max_num_seqs, config.max_num_batched_tokens)


def refusal(config: EngineConfig, request: Request) -> str | None:
    """Why a request can never run, known before it is queued; None: it can."""
    group = SequenceGroup(request, arrival=0, max_width=max_width(config, request.params))
    return None if request.computes_nothing else never_message(config, group)


def never_message(config: EngineConfig, group: SequenceGroup) -> str | None:
    """Why a row can never run, with what it needs and what there is, and what to change; None: it can."""
    if blocks_at_most(config, group) > config.num_blocks:
        return _blocks_message(config, group)
    needed = host_bytes_at_most(config, group)
    if config.host_memory is not None and needed > config.host_memory:
        return _memory_message(config, group, needed)
    return None


def blocks_at_most(config: EngineConfig, group: SequenceGroup) -> int:
    """Maximum number of blocks that a group holds: source and full prompt blocks once, then a tail of each sequence.

    The last generated token is never computed, so its K/V take no slot. With a window, no more of the prompt is
    held than the window before a step's tokens and those, and no more of a tail than the window. Samples that take
    turns may each have to compute the prompt again then: those before them have let go of its first blocks.
    """
    size = config.block_size
    num_prompt = len(group.prompt_token_ids)
    num_stored = num_prompt + group.params.max_tokens - 1
    num_shared = num_prompt // size
    num_tail = -(-num_stored // size) - num_shared
    if config.window is not None:
        num_shared = min(num_shared, (config.window + config.max_num_batched_tokens) // size + 2)
        num_tail = min(num_tail, config.window // size + 2)
        if group.max_width < group.params.width:
            return group.max_width * (num_shared + num_tail)
    num_source = -(-len(group.request.source_token_ids) // size)
    return num_source + num_shared + group.max_width * num_tail


def host_bytes_at_most(config: EngineConfig, group: SequenceGroup) -> int:
    """Memory beside the pool that a group takes at its largest: tokens and logprobs of its outputs until they are
    written, its sequences and, of beams, what a step ranks at once."""
    params, num_prompt = group.params, len(group.prompt_token_ids)
    needed = params.width * (_SEQUENCE_BYTES + params.max_tokens * (_TOKEN_BYTES + _listed(params.logprobs)))
    needed += num_prompt * _listed(params.prompt_logprobs)
    if params.use_beam_search:
        num_ends = len(params.stop_token_ids) + len(config.eos_token_ids)
        num_penalised = params.num_beams**2 if params.diversity_penalty else 0
        candidates = num_candidates(params.num_beams, num_ends, num_penalised)
        if config.vocab_size is not None:
            candidates = min(candidates, params.num_beams * config.vocab_size)
            needed += params.num_beams * config.vocab_size * _SCORE_BYTES
        needed += candidates * _CANDIDATE_BYTES
    return needed


def _listed(num_top: int | None) -> int:
    """Bytes of the logprobs of one position."""
    return 0 if num_top is None else (1 + num_top) * _LOGPROB_BYTES


def _kind(group: SequenceGroup) -> str:
    params = group.params
    kind = f"{params.num_beams} beams" if params.use_beam_search else f"n {params.num_samples}"
    return kind if group.max_width == params.width else f"{kind}, {group.max_width} at once"


def _source(group: SequenceGroup) -> str:
    num_tokens = len(group.request.source_token_ids)
    return f"source {num_tokens} + " if num_tokens else ""


def _blocks_message(config: EngineConfig, group: SequenceGroup) -> str:
    return (
        f"needs {blocks_at_most(config, group)} KV blocks of {config.block_size} tokens ({_source(group)}prompt "
        f"{len(group.prompt_token_ids)} + max_tokens {group.params.max_tokens}, {_kind(group)}), but the pool has "
        f"{config.num_blocks}: raise --kv-memory or --num-blocks, or lower max_tokens"
    )


def _memory_message(config: EngineConfig, group: SequenceGroup, needed: int) -> str:
    params = group.params
    beams, samples = "num_beams", "n" if params.best_of is None else "best_of"
    names = [beams if params.use_beam_search else samples, "max_tokens"]
    names += [name for name in ("logprobs", "prompt_logprobs") if getattr(params, name) is not None]
    asked = ", ".join(f"{name} {params.num_samples if name == samples else getattr(params, name)}" for name in names)
    return (
        f"may need {needed / _GIB:.2f} GiB of memory beside the pool ({asked}), but a row gets at most "
        f"{(config.host_memory or 0) / _GIB:.2f} GiB: lower {' or '.join(names)}"
    )

"""Logits processors: penalties, bans and biases, in Hugging Face's order.

Each changes the float32 scores [vocab_size] of one position in place: logits when sampling, log-probabilities in beam
search, as in `generate`.
"""

from __future__ import annotations

import math
from collections import Counter

import torch
from torch import Tensor

from pagedbatch.model.transfer import to_device
from pagedbatch.params import GenerationParams
from pagedbatch.step import History


def needs_logits_processors(params: GenerationParams, position: int) -> bool:
    """Whether any processor of this request changes scores at this position."""
    return (
        params.reads_history
        or position < params.min_tokens
        or bool(params.logit_bias or params.bad_words or params.allowed_token_ids)
        or forced_token_id(params, position) is not None
    )


def forced_token_id(params: GenerationParams, position: int) -> int | None:
    """The only token that is possible after `position` tokens of an output; None: there is a choice."""
    if position == 0 and params.forced_bos_token_id is not None:
        return params.forced_bos_token_id
    return params.forced_eos_token_id if position == params.max_tokens - 1 else None


def apply_logits_processors(
    scores: Tensor, params: GenerationParams, position: int, history: History | None, eos_token_ids: frozenset[int]
) -> None:
    """Applies every processor that the request uses.

    Repetition penalty, n-gram blocking and bad words look at prompt and output, as in Hugging Face; presence and
    frequency penalties at the output only, as in OpenAI's API. What is left after a ban is not renormalised: a beam's
    score sums the model's own logprobs.

    Args:
        position: number of tokens of the output so far.
        history: prompt and output so far; may be None if the request doesn't read it.
    """
    if params.logit_bias:
        biased, biases = zip(*params.logit_bias, strict=True)
        scores[to_device(biased, torch.int64, scores.device)] += to_device(biases, torch.float32, scores.device)
    token_ids: list[int] = []
    if history is not None:
        token_ids = history.prompt_token_ids + history.output_token_ids
        if params.repetition_penalty != 1.0:
            apply_repetition_penalty(scores, token_ids, params.repetition_penalty)
        if params.presence_penalty or params.frequency_penalty:
            apply_output_penalties(scores, history.output_token_ids, params.presence_penalty, params.frequency_penalty)
        if params.no_repeat_ngram_size > 0:
            _forbid(scores, repeated_ngram_ends(token_ids, params.no_repeat_ngram_size))
    if params.bad_words:
        _forbid(scores, bad_word_ends(token_ids, params.bad_words_ids, eos_token_ids))
    if position < params.min_tokens:
        # Some models name end tokens past their vocabulary.
        _forbid(scores, [i for i in (*eos_token_ids, *params.stop_token_ids) if i < len(scores)])
    forced = forced_token_id(params, position)
    if forced is not None:
        scores.fill_(-math.inf)
        scores[forced] = 0.0  # its probability is 1
    elif params.allowed_token_ids:
        allowed = to_device(params.allowed_token_ids, torch.int64, scores.device)
        kept = scores[allowed]
        scores.fill_(-math.inf)
        scores[allowed] = kept


def _forbid(scores: Tensor, token_ids: list[int]) -> None:
    if token_ids:
        scores.index_fill_(0, to_device(token_ids, torch.int64, scores.device), -math.inf)


def apply_repetition_penalty(scores: Tensor, token_ids: list[int], penalty: float) -> None:
    """Divides positive and multiplies negative scores of tokens seen before (CTRL, arXiv 1909.05858)."""
    seen = to_device(sorted(set(token_ids)), torch.int64, scores.device)
    values = scores[seen]
    scores[seen] = torch.where(values < 0, values * penalty, values / penalty)


def apply_output_penalties(scores: Tensor, token_ids: list[int], presence: float, frequency: float) -> None:
    """Lowers the score of each generated token, once and by its number of occurrences (OpenAI's API)."""
    if token_ids:
        counts = Counter(token_ids)
        seen = to_device(list(counts), torch.int64, scores.device)
        scores[seen] -= presence + frequency * to_device(list(counts.values()), torch.float32, scores.device)


def repeated_ngram_ends(token_ids: list[int], size: int) -> list[int]:
    """Tokens that would complete an n-gram of `size` tokens that occurred before."""
    if len(token_ids) < size:
        return []
    start = token_ids[len(token_ids) - size + 1 :]
    return [token_ids[i + size - 1] for i in range(len(token_ids) - size + 1) if token_ids[i : i + size - 1] == start]


def bad_word_ends(token_ids: list[int], bad_words: list[tuple[int, ...]], eos_token_ids: frozenset[int]) -> list[int]:
    """Tokens that would complete one of `bad_words`. A word of only an end token is ignored, as in Hugging Face."""
    return [
        word[-1]
        for word in bad_words
        if (len(word) > 1 or word[0] not in eos_token_ids)
        and (len(word) == 1 or tuple(token_ids[1 - len(word) :]) == word[:-1])
    ]

"""What logits say before anything is chosen: their normalisers, the most likely tokens, and when they say nothing."""

from __future__ import annotations

import math
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from pagedbatch.model.selection import largest
from pagedbatch.model.transfer import send
from pagedbatch.outputs import TopLogprobs

NOT_NUMBERS = "the model's logits are not finite numbers (NaN or infinity) at this position"


def log_normalisers(logits: Tensor, probabilities: Tensor | None = None) -> Tensor:
    """The logsumexp of each row of float32 [num_rows, vocab_size]; not finite where the row holds NaN or infinity.

    By way of softmax, which torch does several times as fast on a CPU; `probabilities` is that of `logits`, if at hand.
    """
    if probabilities is None:
        probabilities = logits.softmax(dim=-1)
    return logits.amax(dim=-1) - probabilities.amax(dim=-1).log()


def top_logprobs(wanted: list[int | None], scores: Tensor, normalisers: Tensor) -> list[Tensor]:
    """The most likely tokens of each row that asked for them: token ids and logprobs, or nothing where nobody asked.

    Args:
        wanted: how many, for each row; None: not asked.
        scores: float32 [num_rows, vocab_size], raw (before every control).
        normalisers: float32 [num_rows]; a logprob is a score less this.
    """
    asked = [i for i, count in enumerate(wanted) if count is not None]
    if not asked:
        return []
    most = min(max(wanted[i] or 0 for i in asked), scores.shape[1])
    index = send(asked, torch.int64, scores.device)
    values, token_ids = largest(scores[index], most)
    return [token_ids, values - normalisers[index].unsqueeze(1)]


def list_top_logprobs(wanted: list[int | None], tops: list[Any]) -> list[TopLogprobs | None]:
    """What `top_logprobs` found, brought home, row by row; what can't come at all is left out."""
    found = zip(*tops, strict=True)
    listed: list[TopLogprobs | None] = []
    for count in wanted:
        if count is None:
            listed.append(None)
        else:
            pairs = islice(zip(*next(found), strict=True), count)
            listed.append([(token_id, logprob) for token_id, logprob in pairs if logprob > -math.inf])
    return listed

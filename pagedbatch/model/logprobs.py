"""What logits say before anything is chosen: the most likely tokens, and that they are no numbers."""

from __future__ import annotations

import math
from itertools import islice
from typing import Any

import torch
from pagedbatch_kernels.sampling import SamplingOps
from torch import Tensor

from pagedbatch.model.transfer import to_device
from pagedbatch.step import TopLogprobs

NOT_NUMBERS = "the model's logits are not finite numbers (NaN or infinity) at this position"


def to_supported_dtype(logits: Tensor, ops: SamplingOps) -> Tensor:
    """`logits` in a dtype that `ops` reads: as they are, or in float32."""
    return logits if logits.dtype in ops.dtypes else logits.float()


def mask_padding_(scores: Tensor, num_token_ids: int | None) -> None:
    """Sets to minus infinity, in place, what stands behind the tokenizer's last token: it is never chosen or listed.

    Models round their vocabulary up. Normalisers that were taken before stay the model's own.
    """
    if num_token_ids is not None and num_token_ids < scores.shape[1]:
        scores[:, num_token_ids:] = -math.inf


def top_logprobs(wanted: list[int | None], scores: Tensor, normalisers: Tensor, ops: SamplingOps) -> list[Tensor]:
    """The most likely tokens of each row that asked for them: token ids and logprobs, or nothing where nobody asked.

    Args:
        wanted: how many, for each row; None: not asked.
        scores: [num_rows, vocab_size], of a dtype that `ops` reads.
        normalisers: float32 [num_rows]; a logprob is a score less this.
    """
    asked = [i for i, count in enumerate(wanted) if count is not None]
    if not asked:
        return []
    most = min(max(wanted[i] or 0 for i in asked), scores.shape[1])
    if len(asked) < len(wanted):
        index = to_device(asked, torch.int64, scores.device)
        scores, normalisers = scores[index], normalisers[index]
    logprobs, token_ids = ops.joint_topk(scores, normalisers, torch.zeros_like(normalisers), 1, most)
    return [token_ids, logprobs]


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

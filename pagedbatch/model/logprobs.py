"""Top logprobs, and what is done to logits before any choice: a dtype that kernels read, and no padding ids."""

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
    """`logits` as they are, or in float32 if `ops` does not support their dtype."""
    return logits if logits.dtype in ops.dtypes else logits.float()


def mask_padding_(logits: Tensor, num_token_ids: int | None) -> None:
    """Sets the logits of ids past the tokenizer's last token to -infinity, in place: models pad their vocabulary.

    A logsumexp that was taken before remains the model's own.
    """
    if num_token_ids is not None and num_token_ids < logits.shape[1]:
        logits[:, num_token_ids:] = -math.inf


def top_logprobs(counts: list[int | None], logits: Tensor, logsumexp: Tensor, ops: SamplingOps) -> list[Tensor]:
    """The most likely tokens of each position that asks for them: token ids and logprobs; nothing if none does.

    Args:
        counts: number of tokens for each position; None: not asked for.
        logits: [batch_size, vocab_size], of a dtype that `ops` supports.
        logsumexp: float32 [batch_size].

    Returns:
        int64 and float32 [num_asked, max(counts)], or an empty list.
    """
    asked = [i for i, count in enumerate(counts) if count is not None]
    if not asked:
        return []
    k = min(max(counts[i] or 0 for i in asked), logits.shape[1])
    if len(asked) < len(counts):
        index = to_device(asked, torch.int64, logits.device)
        logits, logsumexp = logits[index], logsumexp[index]
    logprobs, token_ids = ops.joint_topk(logits, logsumexp, torch.zeros_like(logsumexp), 1, k)
    return [token_ids, logprobs]


def list_top_logprobs(counts: list[int | None], tops: list[Any]) -> list[TopLogprobs | None]:
    """The result of `top_logprobs` on the host, for each position; impossible tokens are left out."""
    found = zip(*tops, strict=True)
    listed: list[TopLogprobs | None] = []
    for count in counts:
        if count is None:
            listed.append(None)
        else:
            pairs = islice(zip(*next(found), strict=True), count)
            listed.append([(token_id, logprob) for token_id, logprob in pairs if logprob > -math.inf])
    return listed

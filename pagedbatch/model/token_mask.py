"""Masks the tokens that a constraint does not allow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from pagedbatch.constraint import Allowed, AllowedIds, AllowedMask
from pagedbatch.model.transfer import to_device


def apply_token_mask_(scores: Tensor, positions: Sequence[int], allowed: Sequence[Allowed | None]) -> None:
    """Sets the scores of tokens that may not come next to -infinity, in place; the others keep theirs.

    Args:
        scores: float32 [batch_size, vocab_size].
        positions: indices of the constrained positions.
        allowed: the tokens that may come next at each of `positions`; None: any.
    """
    pairs = list(zip(positions, allowed, strict=True))
    listed = [(position, each.token_ids) for position, each in pairs if isinstance(each, AllowedIds)]
    masked = [(position, each.words) for position, each in pairs if isinstance(each, AllowedMask)]
    if listed:
        _keep_listed_(scores, *zip(*listed, strict=True))
    if masked:
        _keep_masked_(scores, *zip(*masked, strict=True))


def _keep_listed_(scores: Tensor, positions: Sequence[int], token_ids: Sequence[np.ndarray]) -> None:
    lengths = [len(ids) for ids in token_ids]
    batch_indices = to_device(np.repeat(np.array(positions), lengths), torch.int64, scores.device)
    ids = to_device(np.concatenate(token_ids), torch.int64, scores.device)
    kept = scores[batch_indices, ids]
    scores.index_fill_(0, to_device(positions, torch.int64, scores.device), -math.inf)
    scores[batch_indices, ids] = kept


def _keep_masked_(scores: Tensor, positions: Sequence[int], words: Sequence[np.ndarray]) -> None:
    mask_bytes = to_device(np.stack(words).astype("<i4", copy=False).view(np.uint8), torch.int32, scores.device)
    # A table turns each byte into what to add to the scores of eight tokens: on a CPU much faster than a bool mask.
    penalties = torch.nn.functional.embedding(mask_bytes, _penalties(scores.device)).flatten(1)[:, : scores.shape[1]]
    scores.index_add_(0, to_device(positions, torch.int64, scores.device), penalties)


@cache
def _penalties(device: torch.device) -> Tensor:
    """For each value of a mask's byte, what to add to the scores of its eight tokens: float32 [256, 8]."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return torch.from_numpy(np.where(bits == 1, 0.0, -math.inf).astype(np.float32)).to(device)

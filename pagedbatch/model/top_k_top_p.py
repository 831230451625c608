"""Top-k, top-p and min-p in torch, by one sort of the vocabulary. On a CPU, token_probs.h does this."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pagedbatch.model.transfer import to_device


def apply_top_k_top_p_(probs: Tensor, top_k: Sequence[int], top_p: Sequence[float], min_p: Sequence[float]) -> Tensor:
    """Sets to zero, in place, what top-k, then top-p, then min-p leave out; exact, and as defined in `Draws`.

    Args:
        probs: float32 [batch_size, vocab_size], each position summing to 1.
        top_k: number of tokens to keep at each position; 0 or less, or vocab_size and more, keeps all.
        top_p: probability to keep at each position; 1.0 keeps all.
        min_p: share of the likeliest token's probability; 0.0 keeps all.

    Returns:
        `probs`, not normalised again.
    """
    device, vocab_size = probs.device, probs.shape[1]
    if any(0 < k < vocab_size for k in top_k) or any(p < 1.0 for p in top_p):
        ranks = [k - 1 if 0 < k < vocab_size else vocab_size - 1 for k in top_k]
        shares = to_device(top_p, torch.float64, device).unsqueeze(1)
        # Stable: among ties the lower id comes first.
        ranked, token_ids = probs.sort(dim=-1, descending=True, stable=True)
        in_top_k = ranked >= ranked.gather(1, to_device(ranks, torch.int64, device).unsqueeze(1))
        mass = (ranked * in_top_k).cumsum(dim=-1, dtype=torch.float64)
        in_top_p = (mass - ranked < shares * mass[:, -1:]) | (shares == 1.0)
        probs.scatter_(1, token_ids, ranked * (in_top_k & in_top_p))
    if any(p > 0 for p in min_p):
        floors = probs.amax(dim=-1, keepdim=True) * to_device(min_p, torch.float32, device).unsqueeze(1)
        probs.masked_fill_(probs < floors, 0.0)
    return probs

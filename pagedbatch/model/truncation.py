"""Top-k and top-p without sorting the vocabulary: only as many likely tokens are ranked as a row needs."""

from __future__ import annotations

import torch
from torch import Tensor

#: Tokens ranked first; rows whose nucleus is larger are ranked again with `_GROWTH` times as many.
_FIRST_LOOK = 128
_GROWTH = 8


def keep_likely(weights: Tensor, top_k: list[int], top_p: list[float]) -> Tensor:
    """Sets to zero what top-k, and then top-p among the rest, leave out.

    A token stays while the probability of those before it is below `top_p`, so that at least one stays; probabilities
    are taken after top-k, as in Hugging Face's warpers (top-p: Holtzman et al., arXiv 1904.09751).

    Args:
        weights: float32 [num_rows, vocab_size], each row summing to 1.
        top_k: tokens to keep in each row; vocab_size keeps all.
        top_p: probability to keep in each row; 1.0 keeps all.

    Returns:
        Weights of the same shape, not normalised; `weights` itself where nothing is left out.
    """
    vocab_size = weights.shape[1]
    pending = [i for i, (k, p) in enumerate(zip(top_k, top_p, strict=True)) if k < vocab_size or p < 1.0]
    if not pending:
        return weights
    kept = weights.clone()
    look = max([_FIRST_LOOK, *(k for k in top_k if k < vocab_size)])
    while pending:
        look = min(look, vocab_size)
        rows = torch.tensor(pending, device=weights.device)
        limits = torch.tensor([[top_k[i]] for i in pending], device=weights.device)
        shares = torch.tensor([[top_p[i]] for i in pending], dtype=torch.float64, device=weights.device)

        ranked, token_ids = weights[rows].topk(look)
        in_top_k = torch.arange(look, device=weights.device) < limits
        mass = torch.where(in_top_k, ranked, 0.0).cumsum(dim=-1, dtype=torch.float64)
        # Where top-k does not bind, the row's whole probability counts, which is 1.
        total = torch.where(limits < vocab_size, mass[:, -1:], 1.0)
        stays = in_top_k & ((mass - ranked) < shares * total)
        # The first look covers every top-k; a nucleus is settled when the last token ranked lies outside of it.
        settled = (limits[:, 0] < vocab_size) | ~stays[:, -1]
        if look == vocab_size:
            settled[:] = True

        done = rows[settled]
        kept[done] = torch.zeros_like(kept[done]).scatter_(1, token_ids[settled], (ranked * stays)[settled])
        pending = rows[~settled].tolist()
        look *= _GROWTH
    return kept

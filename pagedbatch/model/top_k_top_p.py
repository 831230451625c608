"""Top-k, top-p and min-p without sorting the vocabulary: only tokens near a border are ranked. The result is exact."""

from __future__ import annotations

import torch
from torch import Tensor

from pagedbatch.model.topk import largest
from pagedbatch.model.transfer import to_device

#: Tokens ranked at first: the whole nucleus of most rows of a language model.
_FIRST_LOOK = 128
#: The leading bits of a weight in [0, 1] that name its bucket: its exponent and 6 bits of its fraction.
_BUCKET_SHIFT = 17
_NUM_BUCKETS = (0x3F800000 >> _BUCKET_SHIFT) + 2  # 0x3F800000 is 1.0, and rounding may lift a weight above it


def apply_top_k_top_p_(weights: Tensor, top_k: list[int], top_p: list[float], min_p: list[float]) -> Tensor:
    """Sets to zero, in place, what top-k, then top-p, then min-p leave out.

    The meaning is that of Hugging Face's warpers in their order. Top-k keeps what is at least as likely as the k-th
    token. Top-p keeps a token while those before it hold less than `top_p` of what top-k kept, so that at least one
    stays; among equals the lower id comes first (Holtzman et al., arXiv 1904.09751). Min-p keeps what has at least
    `min_p` times the weight of the likeliest. A row's result does not depend on the other rows.

    Args:
        weights: float32 [num_rows, vocab_size], each row summing to 1.
        top_k: tokens to keep in each row; 0 or less, or vocab_size and more, keeps all.
        top_p: probability to keep in each row; 1.0 keeps all.
        min_p: share of the likeliest token's weight; 0.0 keeps all.

    Returns:
        `weights`, not normalised again.
    """
    if weights.device.type != "cpu":
        return keep_by_sorting_(weights, top_k, top_p, min_p)
    vocab_size = weights.shape[1]
    looks: dict[int, list[int]] = {}  # how many tokens to rank -> rows
    for row, (k, p) in enumerate(zip(top_k, top_p, strict=True)):
        if 0 < k < vocab_size or p < 1.0:
            look = _FIRST_LOOK
            while look <= k < vocab_size:  # one more than k, to see ties with the k-th
                look *= 2
            looks.setdefault(min(look, vocab_size), []).append(row)
    for look, rows in looks.items():
        _keep_nucleus_(weights, rows, [top_k[row] for row in rows], [top_p[row] for row in rows], look)
    return _keep_min_p_(weights, min_p)


def keep_by_sorting_(weights: Tensor, top_k: list[int], top_p: list[float], min_p: list[float]) -> Tensor:
    """`apply_top_k_top_p_` by one sort of the vocabulary: on a GPU faster than waiting for a first ranking."""
    device, vocab_size = weights.device, weights.shape[1]
    binding = [0 < k < vocab_size for k in top_k]
    if any(binding) or any(p < 1.0 for p in top_p):
        has_top_k = to_device(binding, torch.bool, device).unsqueeze(1)
        last_ranks = [k - 1 if binds else 0 for k, binds in zip(top_k, binding, strict=True)]
        shares = to_device(top_p, torch.float64, device).unsqueeze(1)
        ranked, token_ids = weights.sort(dim=-1, descending=True, stable=True)
        floors = torch.where(has_top_k, ranked.gather(1, to_device(last_ranks, torch.int64, device).unsqueeze(1)), 0.0)
        weights.scatter_(1, token_ids, ranked * _stays(ranked, floors, shares))
    return _keep_min_p_(weights, min_p)


def _stays(ranked: Tensor, floors: Tensor, shares: Tensor, is_whole: Tensor | None = None) -> Tensor:
    """Which of the likeliest tokens, best first, top-k and top-p keep.

    Args:
        is_whole: bool [num_rows, 1], rows of which `ranked` is a part and whose whole probability, 1, counts; in the
            others what lies above `floors` counts.
    """
    in_top_k = ranked >= floors
    mass = (ranked * in_top_k).cumsum(dim=-1, dtype=torch.float64)
    total = mass[:, -1:] if is_whole is None else torch.where(is_whole, 1.0, mass[:, -1:])
    return in_top_k & ((mass - ranked < shares * total) | (shares == 1.0))


def _keep_min_p_(weights: Tensor, min_p: list[float]) -> Tensor:
    if any(p > 0 for p in min_p):
        floors = weights.amax(dim=-1, keepdim=True) * to_device(min_p, torch.float32, weights.device).unsqueeze(1)
        _zero_below_(weights, floors)
    return weights


def _keep_nucleus_(weights: Tensor, rows: list[int], top_k: list[int], top_p: list[float], look: int) -> None:
    """Top-k and top-p of some rows. The `look` likeliest tokens are ranked; that settles most rows."""
    device, vocab_size = weights.device, weights.shape[1]
    index = torch.tensor(rows, device=device)
    binding = [0 < k < vocab_size for k in top_k]
    has_top_k = torch.tensor(binding, device=device).unsqueeze(1)
    last_rank = torch.tensor([k - 1 if binds else 0 for k, binds in zip(top_k, binding, strict=True)], device=device)
    shares = torch.tensor(top_p, dtype=torch.float64, device=device).unsqueeze(1)

    chosen = weights if len(rows) == len(weights) else weights[index]
    ranked, token_ids = _ranked(*largest(chosen, look))
    floors = torch.where(has_top_k, ranked.gather(1, last_rank.unsqueeze(1)), 0.0)
    stays = _stays(ranked, floors, shares, is_whole=~has_top_k if look < vocab_size else None)
    # Settled when the last token that stays is likelier than the last one seen: all its equals were seen then.
    lightest = ranked.gather(1, stays.sum(dim=-1, keepdim=True) - 1)
    settled = (lightest > ranked[:, -1:]).squeeze(1) if look < vocab_size else torch.ones_like(index, dtype=torch.bool)

    done = index[settled]
    weights.index_fill_(0, done, 0.0)
    weights[done.unsqueeze(1), token_ids[settled]] = (ranked * stays)[settled]
    if len(done) < len(rows):
        _keep_wide_nucleus_(weights, index[~settled], floors[~settled], shares[~settled])


def _keep_wide_nucleus_(all_weights: Tensor, index: Tensor, floors: Tensor, shares: Tensor) -> None:
    """Top-p of rows whose nucleus is large: weighs buckets of like tokens, then ranks those of one bucket.

    Args:
        all_weights: float32 [_, vocab_size].
        index: int64 [num_rows], the rows that are meant.
        floors: float32 [num_rows, 1], weights below which top-k leaves tokens out.
        shares: float64 [num_rows, 1], probability to keep of what top-k kept.
    """
    weights = _zero_below_(all_weights[index], floors)
    num_rows = weights.shape[0]
    # Bits of positive floats rise with their values.
    buckets = weights.view(torch.int32) >> _BUCKET_SHIFT
    first_bucket = torch.arange(num_rows, dtype=torch.int32, device=weights.device).unsqueeze(1) * _NUM_BUCKETS
    masses = torch.bincount(
        (buckets + first_bucket).flatten(), weights.double().flatten(), minlength=num_rows * _NUM_BUCKETS
    ).view(num_rows, _NUM_BUCKETS)
    from_here_up = masses.flip(-1).cumsum(dim=-1).flip(-1)
    targets = torch.where(shares < 1.0, shares * from_here_up[:, :1], torch.inf)
    # The lowest bucket with less than the target above it holds the border.
    above = from_here_up - masses
    border = (above >= targets).sum(dim=-1, keepdim=True)

    rows, token_ids = (buckets == border).nonzero(as_tuple=True)
    counts = torch.bincount(rows, minlength=num_rows)
    column = torch.arange(len(rows), device=weights.device) - (counts.cumsum(0) - counts)[rows]
    width = int(counts.max())
    near = weights.new_zeros(num_rows, width)
    near[rows, column] = weights[rows, token_ids]
    near_ids = torch.zeros_like(near, dtype=torch.int64)
    near_ids[rows, column] = token_ids

    ranked, ranked_ids = _ranked(near, near_ids)
    before = above.gather(1, border) + ranked.cumsum(dim=-1, dtype=torch.float64) - ranked
    leaves = (before >= targets) & (ranked > 0)
    # Below the border nothing stays, above it everything does.
    lower_edge = (border.int() << _BUCKET_SHIFT).view(torch.float32)
    _zero_below_(weights, lower_edge)
    leaving_rows, leaving_columns = leaves.nonzero(as_tuple=True)
    weights[leaving_rows, ranked_ids[leaving_rows, leaving_columns]] = 0.0
    all_weights[index] = weights


def _ranked(values: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Values in falling order with their token ids; among equals, lower ids first."""
    token_ids, order = token_ids.sort(dim=-1)
    values, by_value = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, token_ids.gather(1, by_value)


def _zero_below_(weights: Tensor, floors: Tensor) -> Tensor:
    """Sets weights below their row's floor to zero, in place."""
    # In floats throughout: on a CPU, masks of bools take many times as long.
    return weights.mul_(torch.ge(weights, floors, out=torch.empty_like(weights)))

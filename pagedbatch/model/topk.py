"""The largest entries of long rows: the work of `topk` and `argmax`, at a fraction of their time on a CPU.

Rows are cut into spans whose maxima are cheap to find. The `count` largest entries of a row lie in the `count` spans
with the largest maxima, so that only those spans are ranked.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SPAN = 32


def first_largest(values: Tensor) -> Tensor:
    """Index of each row's largest entry, the first of equals: int64 [num_rows] for `values` [num_rows, size]."""
    spans = _spans(values)
    rows = torch.arange(values.shape[0], device=values.device)
    chosen = spans.amax(dim=-1).argmax(dim=-1)
    return chosen * _SPAN + spans[rows, chosen].argmax(dim=-1)


def largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest entries of each row, best first, and their indices: both [num_rows, count].

    Which of equal entries at the end of the list are in it is not defined.

    Args:
        values: float [num_rows, size], size at least `count`.
    """
    num_rows, size = values.shape
    if count * _SPAN * 2 > size:
        top = values.topk(count)
        return top.values, top.indices
    spans = _spans(values)
    rows = torch.arange(num_rows, device=values.device).unsqueeze(1)
    chosen = spans.amax(dim=-1).topk(count, sorted=False).indices
    top = spans[rows, chosen].flatten(1).topk(count)
    return top.values, chosen.gather(1, top.indices // _SPAN) * _SPAN + top.indices % _SPAN


def _spans(values: Tensor) -> Tensor:
    """`values` as [num_rows, num_spans, span]; what fills up the last span is below every number."""
    padding = -values.shape[1] % _SPAN
    if padding:
        values = torch.nn.functional.pad(values, (0, padding), value=float("-inf"))
    return values.view(values.shape[0], -1, _SPAN)

"""Rows of numbers among which one is no number, for the tests that nobody else is touched by it."""

from __future__ import annotations

import torch
from torch import Tensor

#: NaN, and what becomes NaN when it is multiplied by zero or taken from itself.
BAD = (torch.nan, torch.inf, -torch.inf)
#: Rows, and their sizes, that fill no tile and no register, and some that do.
NUM_ROWS = (2, 5, 7, 33)
SIZES = (1, 7, 17, 33, 43, 96, 172, 576)


def with_one_bad_row(rows: Tensor) -> list[tuple[Tensor, int, Tensor]]:
    """`rows` with the first, one in the middle or the last of them bad: the new rows, which one, and which are not.

    A bad row holds nothing but such numbers, or one at its end.
    """
    cases = []
    for place, index in enumerate(dict.fromkeys((0, len(rows) // 2, len(rows) - 1))):
        for value in BAD:
            mixed = rows.clone()
            mixed[index, slice(None) if place % 2 else slice(-1, None)] = value
            cases.append((mixed, index, torch.tensor([row for row in range(len(rows)) if row != index])))
    return cases

"""Loops at the end of outputs."""

from __future__ import annotations

import pytest

from pagedbatch.output.repetition import num_repeated_tokens


@pytest.mark.parametrize(
    ("token_ids", "expected"),
    [
        ([], 0),
        (list(range(40)), 0),
        ([5] * 9, 8),
        ([5] * 8, 0),
        ([1, 2, 3, *[7, 8] * 6], 10),
        ([1, 2, 3, *[7, 8, 9, 4] * 3], 8),
        ([1, 2, 3, *[7, 8, 9, 4] * 2], 0),
        ([*[7, 8] * 6, 1], 0),
        ([*range(33), *range(33), *range(33)], 0),
        ([*range(32), *range(32), *range(32)], 64),
    ],
    ids=str,
)
def test_loops(token_ids: list[int], expected: int) -> None:
    assert num_repeated_tokens(token_ids) == expected

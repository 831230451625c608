"""What one-line messages are made of."""

from __future__ import annotations

import pytest

from pagedbatch.wording import finished_of


@pytest.mark.parametrize(
    ("num_finished", "num_rows", "words"),
    [
        (0, 24, "0 of 24 rows are finished"),
        (1, 24, "1 of 24 rows is finished"),
        (2, 24, "2 of 24 rows are finished"),
        (0, 1, "0 of 1 row are finished"),
        (1, 1, "1 of 1 row is finished"),
    ],
)
def test_how_many_rows_are_finished(num_finished: int, num_rows: int, words: str) -> None:
    assert finished_of(num_finished, num_rows) == words

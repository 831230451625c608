"""How counts are told inside a one-line message; values and foreign errors are told as in `wording`."""

from __future__ import annotations

from pagedbatch.wording import first_line, short

__all__ = ["finished_of", "first_line", "short"]


def finished_of(num_finished: int, num_rows: int) -> str:
    """`1 of 24 rows is finished`."""
    rows, are = "row" if num_rows == 1 else "rows", "is" if num_finished == 1 else "are"
    return f"{num_finished} of {num_rows} {rows} {are} finished"

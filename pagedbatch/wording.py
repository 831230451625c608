"""How values, counts and other libraries' errors are told inside a one-line message."""

from __future__ import annotations

from typing import Any

_MOST_CHARACTERS = 60


def short(value: Any) -> str:
    """A value, cut when it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # more digits than Python prints; lists in lists without end
        return f"a value of type {type(value).__name__} that is too large to show"
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 3]}..."


def named(error: BaseException) -> str:
    """An error of another library with its type: `RuntimeError: out of memory`."""
    return f"{type(error).__name__}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    """An error of another library, without what follows its first line."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def finished_of(num_finished: int, num_rows: int) -> str:
    """`1 of 24 rows is finished`."""
    rows, are = "row" if num_rows == 1 else "rows", "is" if num_finished == 1 else "are"
    return f"{num_finished} of {num_rows} {rows} {are} finished"

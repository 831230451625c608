"""Numbers, values and other libraries' errors as text for people, in one style everywhere."""

from __future__ import annotations

from typing import Any

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def short(value: Any) -> str:
    """A value as Python writes it, cut when it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # more digits than Python prints; lists in lists without end
        return f"a value of type {type(value).__name__} that is too large to show"
    return cut(text)


def cut(text: str, max_characters: int = 60) -> str:
    """A text, or its beginning with three dots."""
    return text if len(text) <= max_characters else f"{text[: max_characters - 3]}..."


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


def duration(seconds: float) -> str:
    """A time that has passed: `0.8 s`, `42 s`, `3 min 05 s`, `2 h 07 min`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02} min"


def size(num_bytes: float) -> str:
    """Bytes in binary units with three figures: `980 B`, `3.38 MiB`, `12.5 GiB`."""
    value, exponent = float(num_bytes), 0
    while value >= 1000 and exponent < len(_UNITS) - 1:
        value /= 1024
        exponent += 1
    decimals = 0 if exponent == 0 or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:,.{decimals}f} {_UNITS[exponent]}"


def percent(share: float | None) -> str:
    """A share between 0 and 1 with one decimal; a dash where there is none."""
    return "-" if share is None else f"{share:.1%}"


def plural(count: int, noun: str, many: str | None = None) -> str:
    """`1 row`, `1,000 rows`."""
    return f"{count:,} {noun if count == 1 else many or noun + 's'}"


def sized(words: str, num_bytes: float) -> str:
    """`4 blocks, 1.0 MiB`; the words alone where there are no bytes: a simulation may not know how large a block is."""
    return f"{words}, {size(num_bytes)}" if num_bytes else words

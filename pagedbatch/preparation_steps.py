"""What a row is being prepared with just now.

Each step that a row may make endless is named before it begins: whoever ends it can then say which one it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

#: The steps of a row, as messages name them.
READING = "reading the row"
CHAT_TEMPLATE = "rendering the chat template"
TOKENIZING = "tokenizing the prompt"


class Watch(Protocol):
    """Whoever bounds the steps of this process."""

    def begin(self, name: str, source: str) -> None: ...

    def end(self) -> None: ...

    def pause(self) -> float: ...

    def resume(self, left: float) -> None: ...


_watch: Watch | None = None


def set_watch(watch: Watch | None) -> None:
    """Has the steps of this process watched from now on; None: by nobody."""
    global _watch
    _watch = watch


@contextmanager
def step(name: str, source: str = "") -> Iterator[None]:
    """One step of a row. `source` is the same for rows that bring the same schema, grammar or list.

    Raises:
        RowError: this source had no end, or not enough memory, for an earlier row.
    """
    if _watch is None:
        yield
        return
    _watch.begin(name, source)
    try:
        yield
    except MemoryError:
        raise  # this is what the process ends over: it is to be the last that was said
    except BaseException:
        _watch.end()
        raise
    _watch.end()


@contextmanager
def not_counted() -> Iterator[None]:
    """What is made once, for all rows, does not count for the row that happens to need it first."""
    if _watch is None:
        yield
        return
    left = _watch.pause()
    try:
        yield
    finally:
        _watch.resume(left)

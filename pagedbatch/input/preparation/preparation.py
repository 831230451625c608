"""How rows are prepared here: in a process that can be ended, or in this one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from pagedbatch.input.prefetch import Prepared, Preparer
from pagedbatch.input.preparation.limits import MAX_ROWS_AHEAD, RowLimits
from pagedbatch.input.row import Row


class Preparation(Protocol):
    """Prepares rows in their order."""

    def prepare(self, rows: Iterable[Row], max_ahead: int = MAX_ROWS_AHEAD) -> Iterator[Prepared | None]:
        """The rows prepared, in their order; None, again and again, while the next one takes long.

        At most `max_ahead` rows are read ahead.
        """

    def cancel(self) -> None:
        """Ends `prepare`, soon and from any thread."""

    def close(self) -> None:
        """Lets go of what it holds."""


class InThisProcess:
    """Prepares rows here, without bounds of time and memory."""

    def __init__(self, preparer: Preparer) -> None:
        self._preparer = preparer

    def prepare(self, rows: Iterable[Row], max_ahead: int = MAX_ROWS_AHEAD) -> Iterator[Prepared | None]:
        yield from map(self._preparer.prepare, rows)

    def cancel(self) -> None:
        return None

    def close(self) -> None:
        return None


def open_preparation(preparer: Preparer, limits: RowLimits) -> Preparation:
    """In a process of its own, where the system has what that takes: to be called before weights are loaded."""
    try:
        from pagedbatch.input.preparation.bounded import BoundedPreparation
    except ImportError:  # `fcntl` and `resource` are Unix
        return InThisProcess(preparer)
    from pagedbatch.input.preparation.zygote import can_fork

    return BoundedPreparation(preparer, limits) if can_fork() else InThisProcess(preparer)

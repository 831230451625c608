"""Prepares rows ahead of the steps: a thread reads, parses and tokenises while the engine works.

What stays of a row until it is answered is small, whatever the row was, so that memory does not grow with the input.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

from pagedbatch.constraints.build import ConstraintBuilder
from pagedbatch.errors import RowError
from pagedbatch.input.kept_columns import KeptColumns
from pagedbatch.input.requests import PromptBuilder
from pagedbatch.input.row import Row
from pagedbatch.row_context import RowContext
from pagedbatch.sequence import Request
from pagedbatch.wording import named

Item = TypeVar("Item")

_BATCH = 16
_WAIT_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Prepared:
    """A row ready for the engine, or the reason, place included, why it will never be."""

    context: RowContext
    request: Request | None
    error: str | None


class Preparer:
    """Turns a row into a request and its context; whatever goes wrong with a row stays with it.

    `model_names` are those under which OpenAI batch rows may ask for the model.
    """

    def __init__(self, prompts: PromptBuilder, keep: KeptColumns, model_names: Container[str]) -> None:
        self._prompts = prompts
        self._keep = keep
        self._model_names = model_names

    @property
    def constraints(self) -> ConstraintBuilder:
        """What makes the constraints of rows."""
        return self._prompts.constraints

    def prepare(self, row: Row) -> Prepared:
        """A row made ready here."""
        context, error = self.context(row)
        if error is not None:
            return Prepared(context, None, error)
        try:
            request = self.request(row)
        except MemoryError:
            request = f"{row.place}: it takes more memory than there is"
        return Prepared(context, None, request) if isinstance(request, str) else Prepared(context, request, None)

    def context(self, row: Row) -> tuple[RowContext, str | None]:
        """What the row's answer needs of it, and the reason why there can be none but an error, where it is known.

        Takes no longer than reading the row did.
        """
        error = row.error
        kept = self._keep.nothing
        try:
            kept = self._keep.encode(row.fields)
            row.check_model(self._model_names)
        except RowError as problem:
            error = error or f"{row.place}: {problem}"
        except Exception as problem:
            error = error or unreadable(row, problem)
        return RowContext(row.index, row.id, row.place, row.reply, kept), error

    def request(self, row: Row) -> Request | str:
        """The request of a row without a known error, or the reason, place included, why there is none.

        Raises:
            MemoryError: there is too little for the row.
        """
        try:
            return self._prompts.request(row)
        except RowError as problem:
            return str(problem)
        except MemoryError:
            raise
        except Exception as problem:  # a row that brings out a bug must not cost the others their answers
            return unreadable(row, problem)


def unreadable(row: Row, problem: Exception) -> str:
    """The error of a row that brought out an error of ours or of a library."""
    return f"{row.place}: can't be read: {named(problem)}"


class ReadAhead(Generic[Item]):
    """Goes through `items` in a thread, at most about `max_ahead` of them ahead of whoever takes them.

    To be entered before use; leaving calls `cancel`, which is to end `items` soon, and ends the thread. What `items`
    raises is raised to the taker, in its place. None among them says that the next one takes long: the taker is given
    None too, and whatever else it has to do goes on. `is_wanted` is asked now and then while the taker waits.
    """

    def __init__(
        self,
        items: Iterator[Item | None],
        max_ahead: int,
        cancel: Callable[[], None] = lambda: None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        self._items = items
        self._size = max(1, min(_BATCH, max_ahead // 2))
        self._queue: queue.Queue[Callable[[], list[Item]]] = queue.Queue(max(1, max_ahead // self._size - 1))
        self._cancel = cancel
        self._is_wanted = is_wanted
        self._is_slow = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, name="feeder", daemon=True)
        #: Whether all items have been taken.
        self.is_over = False

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._cancel()
        while self._thread.is_alive():
            try:
                self._queue.get_nowait()  # the thread may be waiting for room
            except queue.Empty:
                self._thread.join(0.01)

    def __iter__(self) -> Iterator[Item | None]:
        while self._is_wanted():
            try:
                give = self._queue.get(block=not self._is_slow, timeout=_WAIT_SECONDS)
            except queue.Empty:
                if self._is_slow:
                    yield None
                continue
            batch = give()
            if not batch:
                self.is_over = True
                return
            yield from batch

    def wait(self) -> None:
        """Until something comes, or a moment."""
        deadline = time.monotonic() + _WAIT_SECONDS
        while self._is_slow and self._queue.empty() and time.monotonic() < deadline:
            time.sleep(_WAIT_SECONDS / 10)

    def _work(self) -> None:
        batch: list[Item] = []
        try:
            for item in self._items:
                if self._stopped.is_set():
                    return
                if item is None:
                    if batch:
                        self._queue.put(_giver(batch))
                        batch = []
                    self._is_slow = True
                    continue
                self._is_slow = False
                batch.append(item)
                if len(batch) == self._size:
                    self._queue.put(_giver(batch))
                    batch = []
        except BaseException as error:
            last = _raiser(error)
        else:
            last = _giver([])
        if batch:
            self._queue.put(_giver(batch))
        self._queue.put(last)


def _giver(batch: list[Item]) -> Callable[[], list[Item]]:
    return lambda: batch


def _raiser(error: BaseException) -> Callable[[], list[Any]]:
    def fail() -> list[Any]:
        raise error

    return fail

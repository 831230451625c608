"""Makes rows ready ahead of the steps: a thread reads, parses and tokenises while the engine works. Knows no engine.

What stays of a row until it is answered is small, whatever the row was, so that memory does not grow with the input.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, Self, TypeVar

from pagedbatch.errors import RowError
from pagedbatch.job.keep import KeptColumns
from pagedbatch.job.messages import first_line
from pagedbatch.job.openai_batch import check_model
from pagedbatch.job.prompts import PromptBuilder
from pagedbatch.job.rows import Row, RowId
from pagedbatch.sequence import Request

Item = TypeVar("Item")

_BATCH = 16


@dataclass(frozen=True, slots=True)
class Ticket:
    """What the answer of a row needs of it. `kept` is the JSON of the columns to carry, None where none were asked for.

    `url` is that of an OpenAI batch row; `from_batch` tells whether it is one.
    """

    index: int
    id: RowId | None
    place: str
    from_batch: bool
    url: Any
    kept: bytes | None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A row ready for the engine, or the reason, place included, why it will never be."""

    ticket: Ticket
    request: Request | None
    error: str | None


class Preparer:
    """Turns a row into a request and a ticket; whatever goes wrong with a row stays with it.

    `model_names` are those under which OpenAI batch rows may ask for the model.
    """

    def __init__(self, prompts: PromptBuilder, keep: KeptColumns, model_names: Container[str]) -> None:
        self._prompts = prompts
        self._keep = keep
        self._model_names = model_names

    def prepare(self, row: Row) -> Prepared:
        request, error = None, None
        kept = self._keep.nothing
        try:
            kept = self._keep.encode(row.fields)
            if row.from_batch:
                check_model(row.fields, self._model_names)
        except RowError as problem:
            error = row.error or f"{row.place}: {problem}"
        if error is None:
            try:
                request = self._prompts.request(row)
            except RowError as problem:
                error = str(problem)
            except Exception as problem:  # a row that brings out a bug must not cost the others their answers
                error = f"{row.place}: can't be read: {type(problem).__name__}: {first_line(problem)}"
        url = row.fields.get("url") if row.from_batch else None
        return Prepared(Ticket(row.index, row.id, row.place, row.from_batch, url, kept), request, error)


class ReadAhead(Generic[Item]):
    """Goes through `items` in a thread, at most about `most` of them ahead of whoever takes them.

    To be entered before use; leaving ends the thread. What `items` raises is raised to the taker, in its place.
    """

    def __init__(self, items: Iterator[Item], most: int) -> None:
        self._items = items
        self._size = max(1, min(_BATCH, most // 2))
        self._queue: queue.Queue[Callable[[], list[Item]]] = queue.Queue(max(1, most // self._size - 1))
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, name="feeder", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        while self._thread.is_alive():
            try:
                self._queue.get_nowait()  # the thread may be waiting for room
            except queue.Empty:
                self._thread.join(0.01)

    def __iter__(self) -> Iterator[Item]:
        while batch := self._queue.get()():
            yield from batch

    def _work(self) -> None:
        batch: list[Item] | None = None
        while batch != [] and not self._stopped.is_set():
            try:
                batch = list(islice(self._items, self._size))
            except BaseException as error:
                self._queue.put(_raiser(error))
                return
            self._queue.put(_giver(batch))


def _giver(batch: list[Item]) -> Callable[[], list[Item]]:
    return lambda: batch


def _raiser(error: BaseException) -> Callable[[], list[Any]]:
    def fail() -> list[Any]:
        raise error

    return fail

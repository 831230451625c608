"""The process that prepares rows, one after the other, until its parent ends it or a row does.

Its CPU time is bounded by the system's timer, which ends it wherever it is: in Python, in a template, inside a library.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import resource
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pagedbatch import preparation_steps as steps
from pagedbatch.errors import RowError
from pagedbatch.input.prefetch import Preparer
from pagedbatch.input.preparation.board import Board
from pagedbatch.input.preparation.limits import RowLimits
from pagedbatch.input.preparation.links import ChildEnd, Frame
from pagedbatch.input.preparation.transfer import RequestSender
from pagedbatch.input.preparation.verdicts import EXIT_MEMORY, TIME_SIGNAL
from pagedbatch.input.row import Row

#: Kinds of frames. To the child: what it is to know, then rows.
SETUP, ROW = b"s", b"r"
#: From the child: one of the first two for each row, in their order; log records in between.
REQUEST, ERROR, LOG = b"q", b"e", b"n"

#: What rows of such a size in bytes get in CPU seconds, where the chat template gets little.
_BYTES_PER_SECOND = 2**20


@dataclass(frozen=True, slots=True)
class Setup:
    """What the processes before this one have taught: see `Verdicts`."""

    refused: dict[str, str]
    template_seconds: float | None


@dataclass(frozen=True, slots=True)
class Inherited:
    """What a child is forked with."""

    preparer: Preparer
    run_part: Any
    limits: RowLimits
    board: Board


def serve(end: ChildEnd, inherited: Inherited) -> None:
    """Prepares rows until the parent is gone. A row that takes too much ends the process."""
    first = end.receive()
    if first is None:
        return
    watch = TimeWatch(inherited.limits, inherited.board, pickle.loads(first.payload))
    _bound_memory(inherited.limits.memory_bytes)
    signal.signal(TIME_SIGNAL, signal.SIG_DFL)
    steps.set_watch(watch)
    logger = logging.getLogger("pagedbatch")
    logger.handlers, logger.propagate = [_ToParent(end)], False
    sender = RequestSender(inherited.run_part, inherited.preparer.constraints)
    while (frame := end.receive()) is not None:
        watch.start_row(len(frame.payload))
        try:
            answer = _answer(pickle.loads(frame.payload), inherited.preparer, sender)
        except MemoryError:
            os._exit(EXIT_MEMORY)  # what the row has taken may not come back: the next one gets a new process
        watch.end_row()
        end.send(answer)


class LogLine(NamedTuple):
    """A line that the parent is to log, as it travels."""

    logger: str
    level: int
    message: str


class _ToParent(logging.Handler):
    """Sends what is logged here to the parent, which logs it."""

    def __init__(self, end: ChildEnd) -> None:
        super().__init__()
        self._end = end

    def emit(self, record: logging.LogRecord) -> None:
        line = LogLine(record.name, record.levelno, record.getMessage())
        self._end.send(Frame(LOG, json.dumps(line).encode()))


def _answer(row: Row, preparer: Preparer, sender: RequestSender) -> Frame:
    request = preparer.request(row)
    if isinstance(request, str):
        return Frame(ERROR, request.encode(errors="replace"))
    return Frame(REQUEST, sender.dumps(request))


class TimeWatch:
    """Sets the timer for each row, and less of it for the chat template where that had no end before."""

    def __init__(self, limits: RowLimits, board: Board, setup: Setup) -> None:
        self._limits = limits
        self._board = board
        self._refused = setup.refused
        self._template_seconds = setup.template_seconds
        self._row_bytes = 0
        self._in_template = False
        self._kept_back = 0.0

    def start_row(self, num_bytes: int) -> None:
        self._row_bytes = num_bytes
        self._board.write(steps.READING, "")
        self.resume(self._limits.cpu_seconds)

    def end_row(self) -> None:
        self.pause()

    def begin(self, name: str, source: str) -> None:
        if source in self._refused:
            raise RowError(f"not tried: {self._refused[source]}")
        self._board.write(name, source)
        self._in_template = name == steps.CHAT_TEMPLATE
        if self._in_template and self._template_seconds is not None:
            left = self.pause()
            little = min(left, self._template_seconds + self._row_bytes / _BYTES_PER_SECOND)
            self._kept_back = left - little
            self.resume(little)

    def end(self) -> None:
        if self._in_template:
            self._in_template = False
            self._template_seconds = None
            self._board.write_rendered()
            if self._kept_back:
                self.resume(self.pause() + self._kept_back)
                self._kept_back = 0.0
        self._board.write(steps.READING, "")

    def pause(self) -> float:
        """Stops the timer; the CPU seconds that were left."""
        return signal.setitimer(signal.ITIMER_PROF, 0)[0]

    def resume(self, left: float) -> None:
        signal.setitimer(signal.ITIMER_PROF, max(left, 1e-6))


def _bound_memory(max_bytes: int) -> None:
    """Allows this many bytes beyond what the process has now."""
    with suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5])
        limit = pages * resource.getpagesize() + max_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):  # where the machine's memory ends, it is this process that goes
        Path("/proc/self/oom_score_adj").write_text("500", encoding="ascii")

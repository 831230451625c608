"""Prepares rows in a process that can be ended: a row that never ends, or that kills the process, costs only itself.

Rows go to the process ahead of the answers, and come back in their order. The parent keeps each until it is answered: a
new process gets those that the old one had not answered.
"""

from __future__ import annotations

import json
import logging
import pickle
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from pagedbatch.input.prefetch import Prepared, Preparer, unreadable
from pagedbatch.input.preparation.board import Board
from pagedbatch.input.preparation.child import ERROR, LOG, REQUEST, ROW, SETUP, Inherited, LogLine, Setup, serve
from pagedbatch.input.preparation.limits import MAX_ROWS_AHEAD, RowLimits
from pagedbatch.input.preparation.links import Frame
from pagedbatch.input.preparation.transfer import RequestReceiver
from pagedbatch.input.preparation.verdicts import Ending, Verdicts
from pagedbatch.input.preparation.zygote import ForkedChild, Zygote
from pagedbatch.input.row import Row
from pagedbatch.row_context import RowContext
from pagedbatch.wording import named

_MAX_BYTES_AHEAD = 4 * 2**20
_POLL_SECONDS = 0.1
#: A row that has used so much, or waited so long, is a slow one: whoever waits for it is told.
_SLOW_CPU_SECONDS = 0.5
_SLOW_SECONDS = 5.0


@dataclass(slots=True)
class _Sent:
    """A row on its way. `prepared` is set once it is answered, for rows with a known error from the start."""

    context: RowContext
    payload: bytes
    prepared: Prepared | None = None
    is_retry: bool = False


class BoundedPreparation:
    """Made while this process is small; to be closed. One pass over rows at a time."""

    def __init__(self, preparer: Preparer, limits: RowLimits) -> None:
        self._preparer = preparer
        self._limits = limits
        self._verdicts = Verdicts(limits)
        self._board = Board()
        self._run_part = preparer.constraints.run_part()
        inherited = Inherited(preparer, self._run_part, limits, self._board)
        self._zygote = Zygote(partial(serve, inherited=inherited))
        self._child: ForkedChild | None = None
        self._receiver = RequestReceiver(self._run_part, preparer.constraints)
        self._num_answered = 0
        self._sent: deque[_Sent] = deque()
        self._logged: set[str] = set()
        self._cancelled = threading.Event()

    def prepare(self, rows: Iterable[Row], max_ahead: int = MAX_ROWS_AHEAD) -> Iterator[Prepared | None]:
        """The rows prepared, in their order; None, again and again, while the next one takes long.

        At most `max_ahead` rows, and about 4 MiB of them, are with the process at a time; a larger one is there alone.

        Raises:
            RunError: the processes can't be started.
            Exception: what `rows` raises, behind the rows before.
        """
        if any(sent.prepared is None for sent in self._sent):
            self._end_child()  # it holds rows of a pass that was not followed to its end
        self._sent.clear()
        coming = iter(rows)
        failure: Exception | None = None
        is_over = False
        while True:
            while not is_over and self._has_room(max_ahead):
                try:
                    row = next(coming, None)
                except Exception as error:
                    failure, row = error, None
                is_over = row is None
                if row is not None:
                    self._send(row)
            if not self._sent:
                break
            for _ in self._wait_for_first():
                if self._cancelled.is_set():
                    return
                yield None
            prepared = self._sent.popleft().prepared
            assert prepared is not None
            yield prepared
        if failure is not None:
            raise failure

    def cancel(self) -> None:
        """Ends the pass, soon and from any thread; there is no other one after it."""
        self._cancelled.set()

    def close(self) -> None:
        """Ends the processes."""
        if self._child is not None:
            self._child.link.close()
            self._child = None
        self._zygote.close()

    def _has_room(self, max_ahead: int) -> bool:
        if not self._sent:
            return True
        return (
            len(self._sent) < min(max_ahead, MAX_ROWS_AHEAD)
            and sum(len(sent.payload) for sent in self._sent) < _MAX_BYTES_AHEAD
        )

    def _send(self, row: Row) -> None:
        context, error = self._preparer.context(row)
        payload = b""
        if error is None:
            try:
                payload = pickle.dumps(row, pickle.HIGHEST_PROTOCOL)
            except Exception as problem:  # nested too deeply, for one
                error = unreadable(row, problem)
        sent = _Sent(context, payload)
        self._sent.append(sent)
        if error is not None:
            sent.prepared = Prepared(context, None, error)
        else:
            self._running_child().link.send(Frame(ROW, payload))

    def _wait_for_first(self) -> Iterator[None]:
        """Until the first row is answered; gives back control now and then when that takes long."""
        first = self._sent[0]
        began = progressed = time.monotonic()
        begun_cpu = last_cpu = -1.0
        while first.prepared is None:
            child = self._running_child()
            try:
                frames = child.link.exchange(_POLL_SECONDS)
            except EOFError:
                self._ended(child, first, stalled=False)
                began = progressed = time.monotonic()
                begun_cpu = last_cpu = -1.0
                continue
            if frames:
                self._take(frames)
                continue
            if self._cancelled.is_set():
                yield
            now, cpu = time.monotonic(), child.cpu_seconds()
            if cpu != last_cpu:
                last_cpu, progressed = cpu, now
            begun_cpu = cpu if begun_cpu < 0 else begun_cpu
            if now - progressed > self._limits.stalled_seconds:
                self._ended(child, first, stalled=True)
                began = progressed = time.monotonic()
                begun_cpu = last_cpu = -1.0
                continue
            if cpu - begun_cpu > _SLOW_CPU_SECONDS or now - began > _SLOW_SECONDS:
                yield

    def _log_once(self, line: LogLine) -> None:
        """Logs what each of several children may say."""
        if line.message not in self._logged:
            self._logged.add(line.message)
            logging.getLogger(line.logger).log(line.level, line.message)

    def _take(self, frames: list[Frame]) -> None:
        waiting = (sent for sent in list(self._sent) if sent.prepared is None)
        for frame in frames:
            if frame.kind == LOG:
                self._log_once(LogLine(*json.loads(frame.payload)))
                continue
            sent = next(waiting)
            self._num_answered += 1
            if frame.kind == ERROR:
                sent.prepared = Prepared(sent.context, None, frame.payload.decode())
                continue
            assert frame.kind == REQUEST
            try:
                sent.prepared = Prepared(sent.context, self._receiver.loads(frame.payload), None)
            except Exception as problem:
                reason = f"its request can't be read back: {named(problem)}"
                sent.prepared = Prepared(sent.context, None, f"{sent.context.place}: {reason}")
                self._end_child()  # what the two sides share is no longer the same
                self._send_unanswered()
                return

    def _ended(self, child: ForkedChild, first: _Sent, *, stalled: bool) -> None:
        """Decides about the row over which a child ended; the next child gets what is unanswered."""
        progress = self._board.read()
        exit_code = self._zygote.end(child)
        self._child = None
        reason = self._verdicts.verdict(
            Ending(None if stalled else exit_code, progress, self._num_answered == 0, first.is_retry)
        )
        if reason is None:
            first.is_retry = True
        else:
            first.prepared = Prepared(first.context, None, f"{first.context.place}: {reason}")
        self._send_unanswered()

    def _send_unanswered(self) -> None:
        """To a new process."""
        link = self._running_child().link
        for sent in self._sent:
            if sent.prepared is None:
                link.send(Frame(ROW, sent.payload))

    def _end_child(self) -> None:
        if self._child is not None:
            self._zygote.end(self._child)
            self._child = None

    def _running_child(self) -> ForkedChild:
        if self._child is None:
            self._board.clear()
            self._child = self._zygote.fork()
            self._receiver = RequestReceiver(self._run_part, self._preparer.constraints)
            self._num_answered = 0
            setup = Setup(self._verdicts.refused, self._verdicts.template_seconds)
            self._child.link.send(Frame(SETUP, pickle.dumps(setup)))
        return self._child

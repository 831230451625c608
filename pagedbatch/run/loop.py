"""The loop around an engine: feeds it a bounded number of rows and delivers each row as soon as it is finished."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from pagedbatch.engine.engine import Engine
from pagedbatch.errors import PagedBatchError, RunError
from pagedbatch.input.prefetch import Prepared
from pagedbatch.output.finished_row import FinishedRow, FinishedRowWriter
from pagedbatch.output.totals import Totals
from pagedbatch.outputs import RequestOutput, StepSnapshot
from pagedbatch.row_context import RowContext
from pagedbatch.run.interrupts import Interrupts
from pagedbatch.sequence import Request
from pagedbatch.stats.memory import MemoryAccount
from pagedbatch.wording import first_line, named


class RowsView(Protocol):
    """The display of a run. `pools` are the workers' own snapshots, if there are workers."""

    def update(
        self, snapshot: StepSnapshot | None, rows_done: int, rows_error: int, pools: Sequence[StepSnapshot] = ()
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class InFlight:
    """A row inside the engine, and its request."""

    context: RowContext
    request: Request


class RowLoop:
    """Runs `rows` and hands each finished one to `deliver`. At most `window` rows are in the engine at a time."""

    def __init__(
        self,
        *,
        rows: Iterator[Prepared | None],
        engine: Engine,
        writer: FinishedRowWriter,
        deliver: Callable[[FinishedRow], None],
        account: MemoryAccount,
        view: RowsView,
        interrupts: Interrupts,
        window: int,
    ) -> None:
        self.totals = Totals()
        self._rows = rows
        self._engine = engine
        self._writer = writer
        self._deliver = deliver
        self._account = account
        self._view = view
        self._interrupts = interrupts
        self._window = window
        self._in_flight: dict[int, InFlight] = {}
        self._snapshot: StepSnapshot | None = None

    def run(self) -> None:
        """Runs until no row is left, or an interrupt is requested.

        None among the rows means that none is ready now: the loop finishes what the engine holds, and may be run again
        later.

        Raises:
            RunError: the input, the engine or the journal failed; what had finished is delivered.
        """
        while not self._interrupts.requested:
            began = time.perf_counter()
            self._feed()
            self._account.add_io(time.perf_counter() - began)
            if not self._engine.has_unfinished:
                return
            self._step()

    def _feed(self) -> None:
        """Fills the engine up to the window. A row that can't become a request is finished here, as an error."""
        while self._engine.num_unfinished < self._window and not self._interrupts.requested:
            prepared = self._next_row()
            if prepared is None:
                return
            context, request = prepared.context, prepared.request
            if request is None:
                self._give(self._writer.fail(context, prepared.error or ""))
                self._show()
                continue
            self._in_flight[context.index] = InFlight(context, request)
            self._engine.add(request)

    def _next_row(self) -> Prepared | None:
        try:
            return next(self._rows, None)
        except Exception as error:
            raise RunError(f"the input can't be read on: {first_line(error)}") from error

    def _step(self) -> None:
        began = time.perf_counter()
        if self.totals.first_step_at is None:
            self.totals.first_step_at = began
        try:
            step = self._engine.step()
        except PagedBatchError:
            raise
        except Exception as error:
            raise RunError(f"a step failed: {named(error)}") from error
        stepped = time.perf_counter()
        for output in step.finished:
            self._finish(output)
        self._account.add_io(time.perf_counter() - stepped)
        if step.snapshot is not None:
            self._snapshot = step.snapshot
            self._account.observe(step.snapshot)
        self._show()

    def _finish(self, output: RequestOutput) -> None:
        row = self._in_flight.pop(output.request_id)
        finished = self._writer.finish(row.context, row.request, output)
        self._give(finished)
        if finished.ok:
            self._account.row_finished(output, row.request.params, self._engine.config.max_model_len)

    def _give(self, finished: FinishedRow) -> None:
        self._deliver(finished)
        self.totals.add(finished)

    def _show(self) -> None:
        self._view.update(self._snapshot, self.totals.rows_done, self.totals.rows_error)

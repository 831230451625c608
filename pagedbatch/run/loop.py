"""The loop around an engine: feeds it a bounded number of rows and delivers each row as soon as it is finished."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
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


@dataclass(slots=True, kw_only=True)
class RowLoop:
    """Runs `rows` and hands each finished one to `deliver`. At most `window` rows are in the engine at a time."""

    rows: Iterator[Prepared | None]
    engine: Engine
    writer: FinishedRowWriter
    deliver: Callable[[FinishedRow], None]
    account: MemoryAccount
    view: RowsView
    interrupts: Interrupts
    window: int
    totals: Totals = field(default_factory=Totals, init=False)
    _in_flight: dict[int, InFlight] = field(default_factory=dict, init=False)
    _snapshot: StepSnapshot | None = field(default=None, init=False)

    def run(self) -> None:
        """Runs until no row is left, or an interrupt is requested.

        None among the rows means that none is ready now: the loop finishes what the engine holds, and may be run again
        later.

        Raises:
            RunError: the input, the engine or the journal failed; what had finished is delivered.
        """
        while not self.interrupts.requested:
            began = time.perf_counter()
            self._feed()
            self.account.add_io(time.perf_counter() - began)
            if not self.engine.has_unfinished:
                return
            self._step()

    def _feed(self) -> None:
        """Fills the engine up to the window. A row that can't become a request is finished here, as an error."""
        while self.engine.num_unfinished < self.window and not self.interrupts.requested:
            prepared = self._next_row()
            if prepared is None:
                return
            context, request = prepared.context, prepared.request
            if request is None:
                self._give(self.writer.fail(context, prepared.error or ""))
                self._show()
                continue
            self._in_flight[context.index] = InFlight(context, request)
            self.engine.add(request)

    def _next_row(self) -> Prepared | None:
        try:
            return next(self.rows, None)
        except Exception as error:
            raise RunError(f"the input can't be read on: {first_line(error)}") from error

    def _step(self) -> None:
        began = time.perf_counter()
        if self.totals.first_step_at is None:
            self.totals.first_step_at = began
        try:
            step = self.engine.step()
        except PagedBatchError:
            raise
        except Exception as error:
            raise RunError(f"a step failed: {named(error)}") from error
        stepped = time.perf_counter()
        for output in step.finished:
            self._finish(output)
        self.account.add_io(time.perf_counter() - stepped)
        if step.snapshot is not None:
            self._snapshot = step.snapshot
            self.account.observe(step.snapshot)
        self._show()

    def _finish(self, output: RequestOutput) -> None:
        row = self._in_flight.pop(output.request_id)
        finished = self.writer.finish(row.context, row.request, output)
        self._give(finished)
        if finished.ok:
            self.account.row_finished(output, row.request.params, self.engine.config.max_model_len)

    def _give(self, finished: FinishedRow) -> None:
        self.deliver(finished)
        self.totals.add(finished)

    def _show(self) -> None:
        self.view.update(self._snapshot, self.totals.rows_done, self.totals.rows_error)

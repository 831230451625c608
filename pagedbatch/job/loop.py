"""The loop of a run: rows into the engine, a bounded number at a time, and finished rows into the journal at once.

Knows the engine and what it is handed; no settings, no files and no terminal.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from pagedbatch.engine.engine import Engine
from pagedbatch.errors import PagedBatchError, RunError
from pagedbatch.job.feeder import Prepared, Ticket
from pagedbatch.job.interrupts import Interrupts
from pagedbatch.job.journal import Journal
from pagedbatch.job.messages import first_line
from pagedbatch.job.openai_batch import answer
from pagedbatch.job.records import Record, RecordWriter, encode_record, error_record
from pagedbatch.outputs import RequestOutput, StepSnapshot
from pagedbatch.sequence import Request
from pagedbatch.stats.memory import MemoryAccount


class RowsView(Protocol):
    """The display, as far as the loop knows it."""

    def update(self, snapshot: StepSnapshot | None, rows_done: int, rows_error: int) -> None: ...


@dataclass(frozen=True, slots=True)
class InFlight:
    """A row inside the engine, and the request that it became."""

    ticket: Ticket
    request: Request


@dataclass(slots=True)
class Totals:
    """What the loop did. Times are `time.perf_counter` seconds, None while it did not happen."""

    rows_ok: int = 0
    rows_error: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    first_step_at: float | None = None
    last_row_at: float | None = None

    @property
    def rows_done(self) -> int:
        return self.rows_ok + self.rows_error

    @property
    def seconds(self) -> float:
        """From the first step to the last row."""
        if self.first_step_at is None or self.last_row_at is None:
            return 0.0
        return max(0.0, self.last_row_at - self.first_step_at)


class RowLoop:
    """Runs `rows`, which `journal` does not hold yet. `window` is the most rows inside the engine at a time.

    `batch_model` is the name that answers in OpenAI's shape carry; None: such rows are answered as others are.
    """

    def __init__(
        self,
        *,
        rows: Iterator[Prepared],
        engine: Engine,
        records: RecordWriter,
        journal: Journal,
        account: MemoryAccount,
        view: RowsView,
        interrupts: Interrupts,
        batch_model: str | None,
        window: int,
    ) -> None:
        self.totals = Totals()
        self._rows = rows
        self._engine = engine
        self._records = records
        self._journal = journal
        self._account = account
        self._view = view
        self._interrupts = interrupts
        self._batch_model = batch_model
        self._window = window
        self._in_flight: dict[int, InFlight] = {}
        self._snapshot: StepSnapshot | None = None

    def run(self) -> None:
        """Until every row is in the journal, or an interrupt is requested.

        Raises:
            RunError: the input, the engine or the journal failed; what had finished is in the journal.
        """
        while not self._interrupts.requested:
            began = time.perf_counter()
            self._feed()
            self._account.add_io(time.perf_counter() - began)
            if not self._engine.has_unfinished:
                return
            self._step()

    def _feed(self) -> None:
        """Fills the engine up to the window. A row that can't become a request is finished right here."""
        while self._engine.num_unfinished < self._window and not self._interrupts.requested:
            prepared = self._next_row()
            if prepared is None:
                return
            ticket, request = prepared.ticket, prepared.request
            if request is None:
                self._finish_with_error(ticket, prepared.error or "")
                self._show()
                continue
            self._in_flight[ticket.index] = InFlight(ticket, request)
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
            raise RunError(f"a step failed: {type(error).__name__}: {first_line(error)}") from error
        stepped = time.perf_counter()
        for output in step.finished:
            self._finish(output)
        self._account.add_io(time.perf_counter() - stepped)
        if step.snapshot is not None:
            self._snapshot = step.snapshot
            self._account.observe(step.snapshot)
        self._show()

    def _finish(self, output: RequestOutput) -> None:
        finished = self._in_flight.pop(output.request_id)
        ticket, request = finished.ticket, finished.request
        if output.error is not None:
            self._finish_with_error(ticket, f"{ticket.place}: {output.error}")
            return
        try:
            encoded = self._encode(ticket, self._records.ok_record(ticket.id, output, request))
        except Exception as error:  # one answer that can't be written must not cost the others theirs
            problem = f"{type(error).__name__}: {first_line(error)}"
            self._finish_with_error(ticket, f"{ticket.place}: its answer can't be written: {problem}")
            return
        self._append(ticket, encoded, ok=True)
        self._account.row_finished(output, request.params, self._engine.config.max_model_len)
        self.totals.rows_ok += 1
        self.totals.prompt_tokens += output.num_prompt_tokens
        self.totals.output_tokens += output.num_output_tokens

    def _finish_with_error(self, ticket: Ticket, message: str) -> None:
        self._append(ticket, self._encode(ticket, error_record(ticket.index, ticket.id, message)), ok=False)
        self.totals.rows_error += 1

    def _encode(self, ticket: Ticket, record: Record) -> bytes:
        if ticket.from_batch and self._batch_model is not None:
            record = answer(record, ticket.url, self._batch_model)
        return encode_record(record, ticket.kept)

    def _append(self, ticket: Ticket, encoded: bytes, *, ok: bool) -> None:
        self._journal.append(ticket.index, encoded, ok=ok)
        self.totals.last_row_at = time.perf_counter()

    def _show(self) -> None:
        self._view.update(self._snapshot, self.totals.rows_done, self.totals.rows_error)

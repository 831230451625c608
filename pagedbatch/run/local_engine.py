"""Runs the rows on one engine in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pagedbatch.input.prefetch import ReadAhead
from pagedbatch.input.preparation.preparation import Preparation
from pagedbatch.output.finished_row import FinishedRow, FinishedRowWriter
from pagedbatch.output.totals import Totals
from pagedbatch.run.interrupts import Interrupts
from pagedbatch.run.loop import RowLoop, RowsView
from pagedbatch.run.pending_rows import PendingRows
from pagedbatch.run.setup import EngineSetup, new_account
from pagedbatch.settings import RunSettings
from pagedbatch.stats.memory import MemoryAccount
from pagedbatch.stats.schema import Worker

#: Maximum rows inside the engine, in units of `max_num_seqs`: enough that it never waits for the next one.
WINDOW = 2


class LocalEngine:
    """One engine, and a thread that prepares rows ahead of its steps."""

    def __init__(
        self, settings: RunSettings, preparation: Preparation, writer: FinishedRowWriter, engine_setup: EngineSetup
    ) -> None:
        self.totals = Totals()
        self._window = WINDOW * settings.max_num_seqs
        self._preparation = preparation
        self._writer = writer
        self._setup = engine_setup
        self._account = new_account(settings, engine_setup)

    def run(
        self, rows: PendingRows, deliver: Callable[[FinishedRow], None], view: RowsView, interrupts: Interrupts
    ) -> None:
        """Runs until every row is delivered, or an interrupt is requested.

        Raises:
            RunError: the input, the engine or `deliver` failed; what had finished is delivered.
        """
        with ReadAhead(
            self._preparation.prepare(rows, max(1, self._window // 2)),
            self._window,
            cancel=self._preparation.cancel,
            is_wanted=lambda: not interrupts.requested,
        ) as ready:
            loop = RowLoop(
                rows=iter(ready),
                engine=self._setup.engine,
                writer=self._writer,
                deliver=deliver,
                account=self._account,
                view=view,
                interrupts=interrupts,
                window=self._window,
            )
            self.totals = loop.totals
            loop.run()
            while not ready.is_over and not interrupts.requested:
                ready.wait()
                loop.run()

    def account(self) -> MemoryAccount:
        """The account up to now."""
        self._account.close(self._setup.engine.pool_counts())
        return self._account

    def used(self) -> dict[str, Any]:
        """What the `auto` settings came to."""
        return self._setup.used()

    def workers(self) -> list[Worker] | None:
        """The stats of each worker: there are none."""
        return None

"""Answers rows with one engine, in this process. Knows no files and no terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pagedbatch.input.prefetch import ReadAhead
from pagedbatch.input.preparation.preparation import Preparation
from pagedbatch.output.finished_row import Answer, AnswerWriter
from pagedbatch.output.totals import Totals
from pagedbatch.run.interrupts import Interrupts
from pagedbatch.run.loop import RowLoop, RowsView
from pagedbatch.run.pending_rows import Unfinished
from pagedbatch.run.startup import DeviceSide, new_account
from pagedbatch.settings import RunSettings
from pagedbatch.stats.memory import MemoryAccount
from pagedbatch.stats.schema import Worker

#: Rows inside the engine at a time, in units of `max_num_seqs`: enough that it never waits for the next one.
WINDOW = 2


class OneProcess:
    """One engine, and a thread that makes rows ready ahead of its steps."""

    def __init__(
        self, settings: RunSettings, preparation: Preparation, answers: AnswerWriter, device: DeviceSide
    ) -> None:
        self.totals = Totals()
        self._window = WINDOW * settings.max_num_seqs
        self._preparation = preparation
        self._answers = answers
        self._device = device
        self._account = new_account(settings, device)

    def run(self, rows: Unfinished, deliver: Callable[[Answer], None], view: RowsView, interrupts: Interrupts) -> None:
        """Until every row is delivered, or an interrupt is requested.

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
                engine=self._device.engine,
                answers=self._answers,
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
        self._account.close(self._device.engine.pool_counts())
        return self._account

    def used(self) -> dict[str, Any]:
        """What settings that choose by themselves came to."""
        return self._device.used()

    def workers(self) -> list[Worker] | None:
        """The stats of each worker: there are none."""
        return None

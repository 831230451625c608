"""Runs groups of rows on a worker's engine, several groups at a time.

The engine has a thread of its own. Groups come from other threads, which wait until theirs is finished; while some
wait, the next ones arrive, so that the engine never runs dry between groups.

A group that was in an engine whose worker died is suspected: it runs with no other rows beside it, and if that kills a
worker too, its rows run one by one. A row that killed a worker each time becomes an error row.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from pagedbatch.input.prefetch import Prepared
from pagedbatch.input.preparation.preparation import Preparation
from pagedbatch.input.row import Row
from pagedbatch.output.finished_row import FinishedRow, FinishedRowWriter
from pagedbatch.outputs import StepSnapshot
from pagedbatch.run.interrupts import Interrupts
from pagedbatch.run.local_engine import WINDOW
from pagedbatch.run.loop import RowLoop
from pagedbatch.run.setup import EngineSetup, new_account
from pagedbatch.run.workers.ledger import MAX_TRIES
from pagedbatch.settings import RunSettings
from pagedbatch.stats.memory import MemoryAccount

SNAPSHOT_SECONDS = 0.25
#: A killed worker loses at most this much of its account.
ACCOUNT_SECONDS = 1.0


class LedgerClient(Protocol):
    """This worker's side of the `Ledger`."""

    def tries(self, rows: Sequence[int]) -> int: ...

    def begin(self, rows: Sequence[int]) -> int: ...

    def survived(self, rows: Sequence[int]) -> None: ...

    def settle(self, rows: Sequence[int]) -> None: ...

    def report(self, snapshot: StepSnapshot | None, account: MemoryAccount | None) -> None: ...


@dataclass(slots=True)
class _Group:
    """A group being run. `tries`: how often it was in an engine whose worker died."""

    prepared: list[Prepared]
    tries: int
    finished: list[FinishedRow] = field(default_factory=list)
    done: Future[list[FinishedRow]] = field(default_factory=Future)

    @property
    def rows(self) -> list[int]:
        return [each.context.index for each in self.prepared]


class GroupRunner:
    """`run` may be called from any thread. Nothing is reported to `ledger` while there is no group."""

    def __init__(
        self,
        settings: RunSettings,
        preparation: Preparation,
        writer: FinishedRowWriter,
        engine_setup: EngineSetup,
        ledger: LedgerClient,
    ) -> None:
        self._preparation = preparation
        self._writer = writer
        self._engine = engine_setup.engine
        self._account = new_account(settings, engine_setup)
        self._ledger = ledger
        self._waiting: deque[_Group] = deque()
        self._has_waiting = threading.Condition()
        self._preparing = threading.Lock()  # one pass at a time
        self._ready: deque[Prepared] = deque()
        self._takes_more = True
        self._group_of: dict[int, _Group] = {}
        self._finished: list[_Group] = []
        self._snapshot_due = self._account_due = 0.0
        self._failure: BaseException | None = None
        self._loop = RowLoop(
            rows=self._next_rows(),
            engine=self._engine,
            writer=writer,
            deliver=self._deliver,
            account=self._account,
            view=self,
            interrupts=Interrupts(),  # never entered: the job ends a worker
            window=WINDOW * settings.max_num_seqs,
        )
        threading.Thread(target=self._work, name="engine", daemon=True).start()

    def run(self, rows: list[Row]) -> list[FinishedRow]:
        """Runs a group and waits until it is finished.

        Raises:
            PagedBatchError: the engine failed; it takes no more groups.
        """
        tries = self._ledger.tries([row.index for row in rows])
        with self._preparing:
            group = _Group([each for each in self._preparation.prepare(rows) if each is not None], tries)
        with self._has_waiting:
            if self._failure is not None:
                raise self._failure
            self._waiting.append(group)
            self._has_waiting.notify()
        finished = group.done.result()
        self._ledger.settle(group.rows)
        return finished

    # --- the engine's thread -------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while True:
                with self._has_waiting:
                    self._has_waiting.wait_for(lambda: bool(self._waiting))
                    group = self._waiting.popleft()
                self._run_group(group)
        except BaseException as error:
            with self._has_waiting:
                self._failure = error
                for group in {id(each): each for each in self._open_groups()}.values():
                    group.done.set_exception(error)

    def _open_groups(self) -> list[_Group]:
        return [*self._group_of.values(), *self._finished, *self._waiting]

    def _run_group(self, group: _Group) -> None:
        """Runs until the engine is empty: with groups that come meanwhile or, if the group is suspected, without."""
        for prepared in group.prepared:
            self._group_of[prepared.context.index] = group
        self._takes_more = group.tries == 0
        if group.tries <= 1:
            self._ledger.begin(group.rows)
            self._ready.extend(group.prepared)
            self._loop.run()
            return
        for prepared in group.prepared:
            self._run_alone(prepared)

    def _run_alone(self, prepared: Prepared) -> None:
        row = [prepared.context.index]
        if self._ledger.begin(row) > MAX_TRIES:
            reason = f"each of the {MAX_TRIES} workers that it was given to died while it ran"
            self._deliver(self._writer.fail(prepared.context, f"{prepared.context.place}: {reason}"))
            self.update(None, 0, 0)
            return
        self._ready.append(prepared)
        self._loop.run()
        self._ledger.survived(row)

    def _next_rows(self) -> Iterator[Prepared | None]:
        """Rows for the engine; None when none is ready now."""
        while True:
            if not self._ready and self._takes_more:
                self._take_waiting()
            yield self._ready.popleft() if self._ready else None

    def _take_waiting(self) -> None:
        with self._has_waiting:
            if not self._waiting or self._waiting[0].tries:
                return
            group = self._waiting.popleft()
        for prepared in group.prepared:
            self._group_of[prepared.context.index] = group
        self._ledger.begin(group.rows)
        self._ready.extend(group.prepared)

    def _deliver(self, finished: FinishedRow) -> None:
        group = self._group_of.pop(finished.index)
        group.finished.append(finished)
        if len(group.finished) == len(group.prepared):
            self._finished.append(group)

    def update(
        self, snapshot: StepSnapshot | None, rows_done: int, rows_error: int, pools: Sequence[StepSnapshot] = ()
    ) -> None:
        """Called by the loop after each step: sends reports that are due, then returns the finished groups.

        In this order, so that the account includes every row that the job has been given.
        """
        now = time.monotonic()
        is_idle = not self._group_of
        if now >= self._account_due or (is_idle and self._finished):
            self._account.close(self._engine.pool_counts())
            self._account_due = now + ACCOUNT_SECONDS
            self._snapshot_due = now + SNAPSHOT_SECONDS
            self._ledger.report(snapshot, self._account)
        elif now >= self._snapshot_due:
            self._snapshot_due = now + SNAPSHOT_SECONDS
            self._ledger.report(snapshot, None)
        for group in self._finished:
            group.done.set_result(group.finished)
        self._finished.clear()

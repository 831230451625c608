"""Answers groups of rows with one engine, several groups at a time. Runs in a worker; knows no Ray and no job.

The engine works in a thread of its own. Groups come from other threads, which wait for their answers; while one waits,
the next is there already, so that the engine never runs dry between groups.

A group that was in an engine whose worker died comes with suspicion: it runs with no other rows beside it, and if that
kills a worker too, each of its rows alone. A row that killed a worker each time is an error.
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
from pagedbatch.output.finished_row import Answer, AnswerWriter
from pagedbatch.outputs import StepSnapshot
from pagedbatch.run.interrupts import Interrupts
from pagedbatch.run.loop import RowLoop
from pagedbatch.run.one_process import WINDOW
from pagedbatch.run.startup import DeviceSide, new_account
from pagedbatch.run.workers.ledger import MOST_TRIES
from pagedbatch.settings import RunSettings
from pagedbatch.stats.memory import MemoryAccount

SNAPSHOT_SECONDS = 0.25
#: A killed worker takes so much of its account with it, at most.
ACCOUNT_SECONDS = 1.0


class Book(Protocol):
    """This worker's side of the `Ledger`."""

    def tries(self, rows: Sequence[int]) -> int: ...

    def begin(self, rows: Sequence[int]) -> int: ...

    def survived(self, rows: Sequence[int]) -> None: ...

    def settle(self, rows: Sequence[int]) -> None: ...

    def report(self, snapshot: StepSnapshot | None, account: MemoryAccount | None) -> None: ...


@dataclass(slots=True)
class _Group:
    """A group on its way. `tries`: how often it was in an engine whose worker died."""

    prepared: list[Prepared]
    tries: int
    answers: list[Answer] = field(default_factory=list)
    done: Future[list[Answer]] = field(default_factory=Future)

    @property
    def rows(self) -> list[int]:
        return [each.context.index for each in self.prepared]


class GroupRunner:
    """`answer` may be called from any thread. Nothing is reported to `book` while no group is there."""

    def __init__(
        self, settings: RunSettings, preparation: Preparation, answers: AnswerWriter, device: DeviceSide, book: Book
    ) -> None:
        self._preparation = preparation
        self._answers = answers
        self._engine = device.engine
        self._account = new_account(settings, device)
        self._book = book
        self._waiting: deque[_Group] = deque()
        self._has_waiting = threading.Condition()
        self._preparing = threading.Lock()  # one pass at a time
        self._ready: deque[Prepared] = deque()
        self._takes_more = True
        self._group_of: dict[int, _Group] = {}
        self._answered: list[_Group] = []
        self._snapshot_due = self._account_due = 0.0
        self._failure: BaseException | None = None
        self._loop = RowLoop(
            rows=self._next_rows(),
            engine=self._engine,
            answers=answers,
            deliver=self._deliver,
            account=self._account,
            view=self,
            interrupts=Interrupts(),  # a worker has none: the job ends it
            window=WINDOW * settings.max_num_seqs,
        )
        threading.Thread(target=self._work, name="engine", daemon=True).start()

    def answer(self, rows: list[Row]) -> list[Answer]:
        """Waits for the answers of a group.

        Raises:
            PagedBatchError: the engine failed; it takes no more groups.
        """
        tries = self._book.tries([row.index for row in rows])
        with self._preparing:
            group = _Group([each for each in self._preparation.prepare(rows) if each is not None], tries)
        with self._has_waiting:
            if self._failure is not None:
                raise self._failure
            self._waiting.append(group)
            self._has_waiting.notify()
        answers = group.done.result()
        self._book.settle(group.rows)
        return answers

    # --- the engine's thread -------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while True:
                with self._has_waiting:
                    self._has_waiting.wait_for(lambda: bool(self._waiting))
                    group = self._waiting.popleft()
                self._run(group)
        except BaseException as error:
            with self._has_waiting:
                self._failure = error
                for group in {id(each): each for each in self._open_groups()}.values():
                    group.done.set_exception(error)

    def _open_groups(self) -> list[_Group]:
        return [*self._group_of.values(), *self._answered, *self._waiting]

    def _run(self, group: _Group) -> None:
        """Until the engine is empty: with what comes meanwhile, or, under suspicion, alone."""
        for prepared in group.prepared:
            self._group_of[prepared.context.index] = group
        self._takes_more = group.tries == 0
        if group.tries <= 1:
            self._book.begin(group.rows)
            self._ready.extend(group.prepared)
            self._loop.run()
            return
        for prepared in group.prepared:
            self._run_alone(prepared)

    def _run_alone(self, prepared: Prepared) -> None:
        row = [prepared.context.index]
        if self._book.begin(row) > MOST_TRIES:
            reason = f"each of the {MOST_TRIES} workers that it was given to died while it ran"
            self._deliver(self._answers.error(prepared.context, f"{prepared.context.place}: {reason}"))
            self.update(None, 0, 0)
            return
        self._ready.append(prepared)
        self._loop.run()
        self._book.survived(row)

    def _next_rows(self) -> Iterator[Prepared | None]:
        """Rows for the engine; None where none is there just now."""
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
        self._book.begin(group.rows)
        self._ready.extend(group.prepared)

    def _deliver(self, answer: Answer) -> None:
        group = self._group_of.pop(answer.row)
        group.answers.append(answer)
        if len(group.answers) == len(group.prepared):
            self._answered.append(group)

    def update(
        self, snapshot: StepSnapshot | None, rows_done: int, rows_error: int, pools: Sequence[StepSnapshot] = ()
    ) -> None:
        """Called by the loop after each step: reports when it is due, and then lets answered groups go.

        In this order, so that the account holds what the job has been given.
        """
        now = time.monotonic()
        is_idle = not self._group_of
        if now >= self._account_due or (is_idle and self._answered):
            self._account.close(self._engine.pool_counts())
            self._account_due = now + ACCOUNT_SECONDS
            self._snapshot_due = now + SNAPSHOT_SECONDS
            self._book.report(snapshot, self._account)
        elif now >= self._snapshot_due:
            self._snapshot_due = now + SNAPSHOT_SECONDS
            self._book.report(snapshot, None)
        for group in self._answered:
            group.done.set_result(group.answers)
        self._answered.clear()

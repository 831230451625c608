"""A worker's engine without Ray and without a model: many groups at once, and those that come with suspicion."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from tiny_job import EchoRunner, engine_setup, tokenizer_setup

from pagedbatch.errors import RunError
from pagedbatch.input.kept_columns import KeptColumns
from pagedbatch.input.prefetch import Preparer
from pagedbatch.input.preparation.preparation import InThisProcess
from pagedbatch.input.row import RawRow, Row, place_row
from pagedbatch.output.finished_row import FinishedRow, FinishedRowWriter
from pagedbatch.output.records import RecordWriter
from pagedbatch.outputs import StepSnapshot
from pagedbatch.run.workers.group_runner import GroupRunner
from pagedbatch.run.workers.ledger import MAX_TRIES, Ledger
from pagedbatch.settings import merge
from pagedbatch.stats.memory import MemoryAccount
from pagedbatch.step import ModelRunnerOutput, SchedulerOutput


class LedgerClient:
    """A worker's side of a ledger that is right here. `reported` has how many rows each account held."""

    def __init__(self, ledger: Ledger) -> None:
        self.reported: list[int] = []
        self._ledger = ledger
        self._lock = threading.Lock()
        ledger.enroll("me", "here")

    def tries(self, rows: Sequence[int]) -> int:
        with self._lock:
            return self._ledger.tries(rows)

    def begin(self, rows: Sequence[int]) -> int:
        with self._lock:
            return self._ledger.begin("me", rows)

    def survived(self, rows: Sequence[int]) -> None:
        with self._lock:
            self._ledger.survived("me", rows)

    def settle(self, rows: Sequence[int]) -> None:
        with self._lock:
            self._ledger.settle("me", rows)

    def report(self, snapshot: StepSnapshot | None, account: MemoryAccount | None) -> None:
        if account is not None:
            self.reported.append(account.lengths().prompt.count)


class Watched(EchoRunner):
    """Notes how many sequences were in each step, and asks `before` what it thinks of it."""

    def __init__(self) -> None:
        super().__init__(1000)
        self.widths: list[int] = []
        self.before: Callable[[], None] = lambda: None

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self.widths.append(len(step.sequences))
        self.before()
        return super().execute(step)


class Worker:
    """What a worker is made of. Rows are one letter and its number, and greedy."""

    def __init__(self) -> None:
        settings = merge({"input": "in", "model": "none", "output": "out", "max_tokens": 4}, {})
        setup = tokenizer_setup(settings, None)
        engine = engine_setup(settings, setup)
        self.engine_runner = Watched()
        engine.engine._runner = self.engine_runner
        self.ledger = Ledger()
        self.client = LedgerClient(self.ledger)
        preparation = InThisProcess(Preparer(setup.prompts, KeptColumns(()), ("none",)))
        self.runner = GroupRunner(
            settings, preparation, FinishedRowWriter(RecordWriter(setup.tokenizer), None), engine, self.client
        )

    def suspect(self, rows: Sequence[Row], deaths: int) -> None:
        """Lets `rows` be in an engine whose worker died, so often."""
        self.ledger.enroll("dead", "elsewhere")
        for _ in range(deaths):
            self.ledger.begin("dead", [row.index for row in rows])


def rows(first: int, count: int) -> list[Row]:
    return [place_row(RawRow({"prompt": f"{chr(97 + i % 26)}{i}"}, line=i + 1), i) for i in range(first, first + count)]


def by_row(finished: Sequence[FinishedRow]) -> dict[int, bytes]:
    return {each.index: each.record for each in finished}


@pytest.fixture
def worker() -> Worker:
    return Worker()


@pytest.fixture
def alone() -> dict[int, bytes]:
    """The record of each of thirty rows, when no other is there."""
    worker = Worker()
    return {row.index: worker.runner.run([row])[0].record for row in rows(0, 30)}


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(10) as pool:
        yield pool


def test_groups_from_many_threads_are_answered_as_each_row_alone(
    worker: Worker, alone: dict[int, bytes], pool: ThreadPoolExecutor
) -> None:
    finished = list(pool.map(worker.runner.run, [rows(first, 3) for first in range(0, 30, 3)]))
    assert [sorted(by_row(group)) for group in finished] == [[i, i + 1, i + 2] for i in range(0, 30, 3)]
    assert {row: record for group in finished for row, record in by_row(group).items()} == alone
    assert worker.ledger.tries(range(30)) == 0, "settled"


def widths_with_another_waiting(worker: Worker, first: Sequence[Row], pool: ThreadPoolExecutor) -> list[int]:
    """Sequences in each step of an engine that `first` has begun on when a second group of three comes."""
    second: list[Future[list[FinishedRow]]] = []

    def let_it_come() -> None:
        if not second:
            second.append(pool.submit(worker.runner.run, rows(20, 3)))
            while not worker.runner._waiting:
                pass

    worker.engine_runner.before = let_it_come
    worker.runner.run(list(first))
    second[0].result()
    return worker.engine_runner.widths


def test_groups_that_wait_join_those_that_run(worker: Worker, pool: ThreadPoolExecutor) -> None:
    assert max(widths_with_another_waiting(worker, rows(0, 3), pool)) == 6


def test_a_suspected_group_has_the_engine_for_itself(worker: Worker, pool: ThreadPoolExecutor) -> None:
    worker.suspect(rows(0, 3), deaths=1)
    assert set(widths_with_another_waiting(worker, rows(0, 3), pool)) == {3}


def test_a_broken_row_is_an_answer_like_the_others(worker: Worker) -> None:
    group = [*rows(0, 1), place_row(RawRow(error="no JSON", line=2), 1)]
    finished = {each.index: each for each in worker.runner.run(group)}
    assert (finished[0].ok, finished[1].ok) == (True, False)
    assert b"line 2: no JSON" in finished[1].record


def test_rows_suspected_twice_run_one_by_one_and_clear_themselves(worker: Worker, alone: dict[int, bytes]) -> None:
    worker.suspect(rows(0, 3), deaths=2)
    tries_of_the_first: list[int] = []
    worker.engine_runner.before = lambda: tries_of_the_first.append(worker.ledger.tries([0]))
    finished = worker.runner.run(rows(0, 3))
    assert (tries_of_the_first[0], tries_of_the_first[-1]) == (3, 2), "it lived: its try is taken back"
    assert max(worker.engine_runner.widths) == 1
    assert by_row(finished) == {row: alone[row] for row in range(3)}
    assert all(each.ok for each in finished)
    assert worker.ledger.tries(range(3)) == 0


def test_a_row_that_killed_a_worker_each_time_is_an_error_and_the_others_are_answered(worker: Worker) -> None:
    worker.suspect(rows(0, 3), deaths=MAX_TRIES - 1)
    worker.suspect(rows(1, 1), deaths=1)
    finished = {each.index: each for each in worker.runner.run(rows(0, 3))}
    assert [finished[row].ok for row in range(3)] == [True, False, True]
    assert b"line 2: each of the 3 workers that it was given to died while it ran" in finished[1].record


def test_what_is_answered_has_been_reported(worker: Worker) -> None:
    """So the account of a worker that dies next holds every row that the job was given."""
    for first in range(0, 9, 3):
        worker.runner.run(rows(first, 3))
        assert worker.client.reported[-1] == first + 3


def test_an_engine_that_fails_fails_all_groups_there_and_takes_no_more(
    worker: Worker, pool: ThreadPoolExecutor
) -> None:
    def fail() -> None:
        raise ValueError("device is gone")

    worker.engine_runner.before = fail
    for future in [pool.submit(worker.runner.run, rows(first, 3)) for first in (0, 3, 6)]:
        with pytest.raises(RunError, match=r"^a step failed: ValueError: device is gone$"):
            future.result()
    with pytest.raises(RunError, match="device is gone"):
        worker.runner.run(rows(9, 1))

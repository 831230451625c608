"""What the workers of a run report, kept in a process of its own so that it outlives them.

One object that workers and job call. It knows which rows were in an engine whose worker died, and so which rows to
suspect; and the last account of each worker, including those that died.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pagedbatch.outputs import StepSnapshot

#: Number of times a row is tried before it becomes an error row.
MAX_TRIES = 3
#: Number of starts without a finished row after which the worker is to blame, not a row it was given.
MAX_FAILED_STARTS = 6


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a worker ended the run. `is_usage`: it is a `UsageError`."""

    message: str
    is_usage: bool


@dataclass(slots=True)
class Incarnation:
    """A worker from one start to its death: what its `auto` settings came to, and what it reported last.

    `account` is a pickled `MemoryAccount`: it comes often, and only the last one is ever unpickled.
    """

    used: dict[str, Any] = field(default_factory=dict)
    is_ready: bool = False
    snapshot: StepSnapshot | None = None
    account: bytes | None = None


@dataclass(slots=True)
class WorkerHistory:
    """A worker and its incarnations, one per start. `rows_again`: rows it got that had been in a worker that died."""

    node: str
    incarnations: list[Incarnation] = field(default_factory=list)
    failed_starts: int = 0
    rows_again: int = 0

    @property
    def restarts(self) -> int:
        return len(self.incarnations) - 1


@dataclass(frozen=True, slots=True)
class Overview:
    """The state for the display. Times are `time.perf_counter` on this machine.

    `pools` are the newest snapshots of the workers that are up, by the order of their first start; `past` are the last
    snapshots of earlier incarnations.
    """

    pools: dict[int, StepSnapshot]
    past: list[StepSnapshot]
    num_ready: int
    restarts: list[int]
    first_step_at: float | None
    failure: Failure | None


class Ledger:
    """All methods are called from other processes, one at a time."""

    def __init__(self) -> None:
        self._tries: dict[int, int] = defaultdict(int)
        self._workers: dict[str, WorkerHistory] = {}
        self._first_step_at: float | None = None
        self._failure: Failure | None = None

    # --- called by workers ---------------------------------------------------------------------------------------

    def enroll(self, worker: str, node: str) -> int:
        """Notes a start. Returns how often this worker has started since it last finished a row, this time included."""
        history = self._workers.setdefault(worker, WorkerHistory(node))
        history.node = node
        history.incarnations.append(Incarnation())
        history.failed_starts += 1
        return history.failed_starts

    def ready(self, worker: str, used: dict[str, Any]) -> None:
        """Notes that a worker's engine is up."""
        current = self._workers[worker].incarnations[-1]
        current.used, current.is_ready = used, True

    def fail(self, failure: Failure) -> None:
        """Notes what ends the run; the first one counts."""
        self._failure = self._failure or failure

    def tries(self, rows: Sequence[int]) -> int:
        """How often the most tried of `rows` was in an engine whose worker died."""
        return max((self._tries.get(row, 0) for row in rows), default=0)

    def begin(self, worker: str, rows: Sequence[int]) -> int:
        """Notes that `rows` go into an engine. Returns the tries of the most tried of them, this one included."""
        for row in rows:
            self._tries[row] += 1
            self._workers[worker].rows_again += 1 < self._tries[row] <= MAX_TRIES
        tries = max(self._tries[row] for row in rows)
        if tries > MAX_TRIES:  # the caller gives the row up: that is progress
            self._workers[worker].failed_starts = 0
        return tries

    def survived(self, worker: str, rows: Sequence[int]) -> None:
        """Takes a try back: the worker is still up."""
        self._workers[worker].failed_starts = 0
        for row in rows:
            self._tries[row] -= 1

    def settle(self, worker: str, rows: Sequence[int]) -> None:
        """Forgets rows that are finished and on their way to the job."""
        self._workers[worker].failed_starts = 0
        for row in rows:
            self._tries.pop(row, None)

    def report(self, worker: str, snapshot: StepSnapshot | None, account: bytes | None) -> None:
        """Takes a worker's newest state; None leaves what it reported before."""
        current = self._workers[worker].incarnations[-1]
        current.snapshot = snapshot or current.snapshot
        current.account = account or current.account
        if snapshot is not None and self._first_step_at is None:
            self._first_step_at = time.perf_counter() - snapshot.step_seconds

    # --- called by the job ---------------------------------------------------------------------------------------

    def overview(self) -> Overview:
        workers = list(self._workers.values())
        current = [worker.incarnations[-1] for worker in workers]
        past = [each for worker in workers for each in worker.incarnations[:-1]]
        return Overview(
            pools={i: each.snapshot for i, each in enumerate(current) if each.snapshot is not None},
            past=[each.snapshot for each in past if each.snapshot is not None],
            num_ready=sum(each.is_ready for each in current),
            restarts=[worker.restarts for worker in workers],
            first_step_at=self._first_step_at,
            failure=self._failure,
        )

    def histories(self) -> dict[str, WorkerHistory]:
        """All workers in the order of their first starts."""
        return self._workers

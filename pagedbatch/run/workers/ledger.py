"""What the workers of a run tell about themselves, kept where no worker's death reaches it. Plain data; knows no Ray.

It lives in a process of its own beside the job, as one object that workers and job call. It knows which rows were in an
engine whose worker died, and so which of them to suspect; and the last account of each worker, dead ones included.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pagedbatch.outputs import StepSnapshot

#: A row is tried so often before it is an error row: at first, and twice more.
MOST_TRIES = 3
#: A worker that starts so often without finishing a row is broken, and not a row that it was given.
MOST_STARTS = 6


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a worker ended the run. `is_usage`: it is the user's to mend, as in `UsageError`."""

    message: str
    is_usage: bool


@dataclass(slots=True)
class Life:
    """One start of a worker up to its death: what its settings came to, and what it reported last.

    `account` is a pickled `MemoryAccount`: it comes often, and only the last one is ever opened.
    """

    used: dict[str, Any] = field(default_factory=dict)
    is_ready: bool = False
    snapshot: StepSnapshot | None = None
    account: bytes | None = None


@dataclass(slots=True)
class WorkerHistory:
    """A worker and its lives, one more than it was restarted. `rows_again`: rows it got that had been in a dead one."""

    node: str
    lives: list[Life] = field(default_factory=list)
    starts_in_vain: int = 0
    rows_again: int = 0

    @property
    def restarts(self) -> int:
        return len(self.lives) - 1


@dataclass(frozen=True, slots=True)
class Overview:
    """The state for the display. `pools` are the newest snapshots of the workers that are up, by their place in the
    order of their first start; `past` those that earlier lives left. Times are `time.perf_counter` on this machine."""

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
        history.lives.append(Life())
        history.starts_in_vain += 1
        return history.starts_in_vain

    def ready(self, worker: str, used: dict[str, Any]) -> None:
        """Notes that a worker's engine is up."""
        life = self._workers[worker].lives[-1]
        life.used, life.is_ready = used, True

    def fail(self, failure: Failure) -> None:
        """Notes what ends the run; the first one counts."""
        self._failure = self._failure or failure

    def tries(self, rows: Sequence[int]) -> int:
        """The most times that one of `rows` was in an engine whose worker died."""
        return max((self._tries.get(row, 0) for row in rows), default=0)

    def begin(self, worker: str, rows: Sequence[int]) -> int:
        """Notes that `rows` go into an engine. Returns the most tries of one of them, this one included."""
        for row in rows:
            self._tries[row] += 1
            self._workers[worker].rows_again += 1 < self._tries[row] <= MOST_TRIES
        tries = max(self._tries[row] for row in rows)
        if tries > MOST_TRIES:  # the caller gives the row up: that is progress
            self._workers[worker].starts_in_vain = 0
        return tries

    def survived(self, worker: str, rows: Sequence[int]) -> None:
        """Takes a try back: the worker still lives."""
        self._workers[worker].starts_in_vain = 0
        for row in rows:
            self._tries[row] -= 1

    def settle(self, worker: str, rows: Sequence[int]) -> None:
        """Forgets rows whose answers are on their way."""
        self._workers[worker].starts_in_vain = 0
        for row in rows:
            self._tries.pop(row, None)

    def report(self, worker: str, snapshot: StepSnapshot | None, account: bytes | None) -> None:
        """Takes a worker's newest state; None leaves what it reported before."""
        life = self._workers[worker].lives[-1]
        life.snapshot = snapshot or life.snapshot
        life.account = account or life.account
        if snapshot is not None and self._first_step_at is None:
            self._first_step_at = time.perf_counter() - snapshot.step_seconds

    # --- called by the job ---------------------------------------------------------------------------------------

    def overview(self) -> Overview:
        workers = list(self._workers.values())
        return Overview(
            pools={i: w.lives[-1].snapshot for i, w in enumerate(workers) if w.lives[-1].snapshot is not None},
            past=[life.snapshot for w in workers for life in w.lives[:-1] if life.snapshot is not None],
            num_ready=sum(w.lives[-1].is_ready for w in workers),
            restarts=[w.restarts for w in workers],
            first_step_at=self._first_step_at,
            failure=self._failure,
        )

    def histories(self) -> dict[str, WorkerHistory]:
        """Every worker in the order of the first starts."""
        return self._workers

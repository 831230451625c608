"""The job's side of the workers: takes their finished rows, updates the display, merges their accounts."""

from __future__ import annotations

import os
import pickle
import queue
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Self

from pagedbatch.errors import RunError, UsageError
from pagedbatch.output.finished_row import FinishedRow
from pagedbatch.output.totals import Totals
from pagedbatch.run.interrupts import Interrupts
from pagedbatch.run.loop import RowsView
from pagedbatch.run.pending_rows import PendingRows
from pagedbatch.run.workers.groups import FinishedGroup, choose_sizes
from pagedbatch.run.workers.ledger import Overview, WorkerHistory
from pagedbatch.run.workers.stall_watch import StallWatch
from pagedbatch.run.workers.worker_engine import WorkerPlan
from pagedbatch.stats.memory import MemoryAccount
from pagedbatch.stats.merge import merge_concurrent, merge_sequential, sum_snapshots
from pagedbatch.stats.schema import Worker
from pagedbatch.wording import named

if TYPE_CHECKING:
    from pagedbatch.run.workers.ray_dataset import RemoteLedger

POLL_SECONDS = 0.25
_GROUPS_AHEAD = 8

#: Keeps Ray from sending usage statistics and from writing to stderr. It reads these when it is imported.
_RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    "RAY_DATA_LOG_LEVEL": "CRITICAL",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_ENABLE_AUTO_CONNECT": "0",  # a call after the end must not start another Ray
}


@contextmanager
def open_workers(plan: WorkerPlan, width: int, rows: PendingRows) -> Iterator[Workers]:
    """Starts the workers on `rows` and waits for their engines: for all on this machine, for the first on a cluster.

    Args:
        width: sequences that a plain row needs at once.

    Raises:
        UsageError: ray is not installed, there is no such cluster, or a worker can't have what it was told.
        RunError: a worker failed to start otherwise.
    """
    if find_spec("ray") is None:
        raise UsageError("--workers and --ray-address need Ray: pip install 'pagedbatch[ray]'")
    for name, value in _RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from pagedbatch.run.workers.ray_cluster import open_cluster

    with open_cluster(plan.settings) as placement:
        from pagedbatch.run.workers.ray_dataset import RemoteLedger, finished_groups

        sizes = choose_sizes(
            max_num_seqs=plan.settings.max_num_seqs,
            width=width,
            num_rows=rows.num_pending,
            num_workers=placement.num_workers,
        )
        ledger = RemoteLedger()
        portable = replace(rows, source=replace(rows.source, spool=None))
        with _GroupReceiver(finished_groups(portable, sizes, plan, placement, ledger)) as receiver:
            workers = Workers(receiver, ledger)
            workers.wait_for(placement.num_awaited)
            yield workers


class _GroupReceiver:
    """Takes groups from Ray Data in a thread, so that the job can look at other things while none comes."""

    def __init__(self, finished: Iterator[FinishedGroup]) -> None:
        self.error: Exception | None = None
        self._finished = finished
        self._queue: queue.Queue[FinishedGroup | None] = queue.Queue(_GROUPS_AHEAD)
        self._stopped = threading.Event()

    def __enter__(self) -> Self:
        threading.Thread(target=self._work, name="receiver", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Lets the thread go: it may be inside Ray, and ends when Ray does."""
        self._stopped.set()

    @property
    def has_group(self) -> bool:
        return not self._queue.empty()

    def take(self) -> FinishedGroup | None:
        """The next group; None after the last, or after `error`.

        Raises:
            queue.Empty: none came in a while.
        """
        return self._queue.get(timeout=POLL_SECONDS)

    def _work(self) -> None:
        try:
            for group in self._finished:
                if not self._put(group):
                    return
        except Exception as error:
            self.error = error
        self._put(None)

    def _put(self, group: FinishedGroup | None) -> bool:
        while not self._stopped.is_set():
            with suppress(queue.Full):
                self._queue.put(group, timeout=POLL_SECONDS)
                return True
        return False


class Workers:
    """The workers of a run, as the job sees them."""

    def __init__(self, receiver: _GroupReceiver, ledger: RemoteLedger) -> None:
        self.totals = Totals()
        self._receiver = receiver
        self._ledger = ledger
        self._rows_of: Counter[str] = Counter()
        self._histories: dict[str, WorkerHistory] = {}
        self._overview: Overview | None = None
        self._looked_at = 0.0
        self._stall_watch = StallWatch(time.monotonic())

    def wait_for(self, num_workers: int) -> None:
        """Waits until `num_workers` engines are up, or it is certain that they won't be.

        Raises:
            UsageError: a worker can't have what it was told.
            RunError: a worker failed otherwise.
        """
        while self._look().num_ready < num_workers and not self._receiver.has_group:
            time.sleep(POLL_SECONDS)
        self._raise_failure()

    def run(
        self, rows: PendingRows, deliver: Callable[[FinishedRow], None], view: RowsView, interrupts: Interrupts
    ) -> None:
        """Runs until every row is delivered, or an interrupt is requested: then what is in the workers is given up.

        Raises:
            RunError: a worker, Ray or `deliver` failed; what had come back is delivered.
        """
        is_delivered = bytearray(rows.finished)
        try:
            while not interrupts.requested:
                with suppress(queue.Empty):
                    group = self._receiver.take()
                    if group is None:
                        self._raise_failure()
                        return
                    # A group comes twice if Ray lost its result: the records are the same.
                    for finished in group.rows:
                        position = finished.index - rows.rows.start
                        if not is_delivered[position]:
                            is_delivered[position] = 1
                            deliver(finished)
                            self.totals.add(finished)
                            self._rows_of[group.worker] += 1
                self._show(view)
        finally:
            with suppress(Exception):  # Ray may be what has failed; then the account is what was seen last
                self._overview = self._ledger.overview()
                self.totals.first_step_at = self._overview.first_step_at
                self._histories = self._ledger.histories()
            self._show(view)

    def account(self) -> MemoryAccount:
        """The account of all pools as if they were one; see `merge_concurrent`."""
        return merge_concurrent([_account(history) for history in self._histories.values()])

    def used(self) -> dict[str, Any]:
        """What the `auto` settings came to in the first worker."""
        incarnations = (each for history in self._histories.values() for each in history.incarnations)
        return next((each.used for each in incarnations if each.used), {})

    def workers(self) -> list[Worker] | None:
        """The stats of each worker, in the order of their first starts."""
        found = []
        for name, history in self._histories.items():
            account = _account(history)
            found.append(
                Worker(
                    node=history.node,
                    rows=self._rows_of[name],
                    restarts=history.restarts,
                    rows_again=history.rows_again,
                    memory=account.pool_memory(),
                    time=account.time(),
                )
            )
        return found

    def _look(self) -> Overview:
        """The ledger's overview, at most `POLL_SECONDS` old."""
        now = time.monotonic()
        if self._overview is None or now - self._looked_at >= POLL_SECONDS:
            try:
                self._overview = self._ledger.overview()
            except Exception as error:
                raise RunError(f"Ray failed: {named(error)}") from error
            self._looked_at = now
            self._stall_watch.look(now, self._overview, self.totals.rows_done)
        return self._overview

    def _show(self, view: RowsView) -> None:
        overview = self._look()
        pools = [overview.pools[worker] for worker in sorted(overview.pools)]
        snapshot = sum_snapshots(pools, overview.past) if pools else None
        view.update(snapshot, self.totals.rows_done, self.totals.rows_error, pools)

    def _raise_failure(self) -> None:
        failure = self._ledger.overview().failure
        if failure is not None:
            raise (UsageError if failure.is_usage else RunError)(failure.message)
        error = self._receiver.error
        if error is not None:
            raise RunError(f"Ray failed: {type(error).__name__}: {_last_line(error)}") from error


def _last_line(error: Exception) -> str:
    """Ray's message about a worker is a traceback in colours that ends with the cause."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip().splitlines()
    return lines[-1].strip() if lines else ""


def _account(history: WorkerHistory) -> MemoryAccount:
    """The account of all incarnations of a worker."""
    return merge_sequential([pickle.loads(each.account) for each in history.incarnations if each.account is not None])

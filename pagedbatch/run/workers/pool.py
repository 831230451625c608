"""The job's side of many engines: takes their answers, tells the display, adds up their accounts. Imports no ray."""

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
from pagedbatch.output.finished_row import Answer
from pagedbatch.output.totals import Totals
from pagedbatch.run.interrupts import Interrupts
from pagedbatch.run.loop import RowsView
from pagedbatch.run.pending_rows import Unfinished
from pagedbatch.run.workers.groups import GroupAnswers, choose_sizes
from pagedbatch.run.workers.ledger import Overview, WorkerHistory
from pagedbatch.run.workers.setup import EnginePlan
from pagedbatch.run.workers.stall_watch import Silence
from pagedbatch.stats.memory import MemoryAccount
from pagedbatch.stats.merge import merge_concurrent, merge_sequential, sum_snapshots
from pagedbatch.stats.schema import Worker
from pagedbatch.wording import named

if TYPE_CHECKING:
    from pagedbatch.run.workers.ray_dataset import RemoteLedger

SECONDS_BETWEEN_LOOKS = 0.25
_GROUPS_AHEAD = 8

#: What Ray says, which it must know before it is imported: nothing to its makers, and nothing on stderr.
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    "RAY_DATA_LOG_LEVEL": "CRITICAL",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_ENABLE_AUTO_CONNECT": "0",  # what calls Ray after its end must not start another one
}


@contextmanager
def open_workers(plan: EnginePlan, width: int, rows: Unfinished, notice: Callable[[str], None]) -> Iterator[Workers]:
    """Starts the workers on `rows` and waits for their engines: for all on this machine, for the first on a cluster.

    Args:
        width: sequences that a plain row needs at once.
        notice: takes a line for the user.

    Raises:
        UsageError: ray is not installed, there is no such cluster, or a worker can't have what it was told.
        RunError: a worker failed to start otherwise.
    """
    if find_spec("ray") is None:
        raise UsageError("--workers and --ray-address need Ray: pip install 'pagedbatch[ray]'")
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    from pagedbatch.run.workers.ray_cluster import open_cluster

    with open_cluster(plan.settings) as workplaces:
        from pagedbatch.run.workers.ray_dataset import RemoteLedger, answered_groups

        sizes = choose_sizes(
            max_num_seqs=plan.settings.max_num_seqs,
            width=width,
            num_rows=rows.num_unfinished,
            num_workers=workplaces.num_workers,
        )
        ledger = RemoteLedger()
        portable = replace(rows, source=replace(rows.source, spool=None))
        with _Taker(answered_groups(portable, sizes, plan, workplaces, ledger)) as taker:
            workers = Workers(taker, ledger, notice)
            workers.wait_for(workplaces.num_awaited)
            yield workers


class _Taker:
    """Takes groups from Ray Data in a thread, so that the job can look at other things while none comes."""

    def __init__(self, answered: Iterator[GroupAnswers]) -> None:
        self.error: Exception | None = None
        self._answered = answered
        self._queue: queue.Queue[GroupAnswers | None] = queue.Queue(_GROUPS_AHEAD)
        self._stopped = threading.Event()

    def __enter__(self) -> Self:
        threading.Thread(target=self._work, name="taker", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Lets the thread go: it may be inside Ray, and ends when Ray does."""
        self._stopped.set()

    @property
    def has_something(self) -> bool:
        return not self._queue.empty()

    def take(self) -> GroupAnswers | None:
        """The next group; None after the last, or after `error`.

        Raises:
            queue.Empty: none came in a while.
        """
        return self._queue.get(timeout=SECONDS_BETWEEN_LOOKS)

    def _work(self) -> None:
        try:
            for group in self._answered:
                if not self._put(group):
                    return
        except Exception as error:
            self.error = error
        self._put(None)

    def _put(self, thing: GroupAnswers | None) -> bool:
        while not self._stopped.is_set():
            with suppress(queue.Full):
                self._queue.put(thing, timeout=SECONDS_BETWEEN_LOOKS)
                return True
        return False


class Workers:
    """The workers of a run, as the job sees them."""

    def __init__(self, taker: _Taker, ledger: RemoteLedger, notice: Callable[[str], None]) -> None:
        self.totals = Totals()
        self._taker = taker
        self._ledger = ledger
        self._rows_of: Counter[str] = Counter()
        self._histories: dict[str, WorkerHistory] = {}
        self._overview: Overview | None = None
        self._looked_at = 0.0
        self._silence = Silence(notice, time.monotonic())

    def wait_for(self, num_workers: int) -> None:
        """Until so many engines are up, or it is certain that they won't be.

        Raises:
            UsageError: a worker can't have what it was told.
            RunError: a worker failed otherwise.
        """
        while self._look().num_ready < num_workers and not self._taker.has_something:
            time.sleep(SECONDS_BETWEEN_LOOKS)
        self._raise_failure()

    def run(self, rows: Unfinished, deliver: Callable[[Answer], None], view: RowsView, interrupts: Interrupts) -> None:
        """Until every row is delivered, or an interrupt is requested: then what is in the workers is given up.

        Raises:
            RunError: a worker, Ray or `deliver` failed; what had come back is delivered.
        """
        is_delivered = bytearray(rows.finished)
        try:
            while not interrupts.requested:
                with suppress(queue.Empty):
                    group = self._taker.take()
                    if group is None:
                        self._raise_failure()
                        return
                    # A group comes twice where Ray lost what it had: the answers are the same.
                    for answer in group.answers:
                        place = answer.row - rows.rows.start  # a shard's first row is its own first
                        if not is_delivered[place]:
                            is_delivered[place] = 1
                            deliver(answer)
                            self.totals.add(answer)
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
        """What settings that choose by themselves came to, in the first worker."""
        lives = [life for history in self._histories.values() for life in history.lives if life.used]
        return lives[0].used if lives else {}

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
        """The ledger's overview, asked for now and then only."""
        now = time.monotonic()
        if self._overview is None or now - self._looked_at >= SECONDS_BETWEEN_LOOKS:
            try:
                self._overview = self._ledger.overview()
            except Exception as error:
                raise RunError(f"Ray failed: {named(error)}") from error
            self._looked_at = now
            self._silence.look(now, self._overview, self.totals.rows_done)
        return self._overview

    def _show(self, view: RowsView) -> None:
        overview = self._look()
        pools = [overview.pools[place] for place in sorted(overview.pools)]
        snapshot = sum_snapshots(pools, overview.past) if pools else None
        view.update(snapshot, self.totals.rows_done, self.totals.rows_error, pools)

    def _raise_failure(self) -> None:
        failure = self._ledger.overview().failure
        if failure is not None:
            raise (UsageError if failure.is_usage else RunError)(failure.message)
        error = self._taker.error
        if error is not None:
            raise RunError(f"Ray failed: {type(error).__name__}: {_last_line(error)}") from error


def _last_line(error: Exception) -> str:
    """What Ray says of a worker begins with a traceback and ends with the cause, in colours."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip().splitlines()
    return lines[-1].strip() if lines else ""


def _account(history: WorkerHistory) -> MemoryAccount:
    """The account of all lives of a worker."""
    return merge_sequential([pickle.loads(life.account) for life in history.lives if life.account is not None])

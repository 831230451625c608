"""Warns when nothing has come from the workers for a long time.

Ray waits for a lost machine of a cluster to come back, however long that takes, and so does the run: whoever reads the
warning decides what to do.
"""

from __future__ import annotations

import logging

from pagedbatch.run.workers.ledger import Overview
from pagedbatch.wording import duration

_log = logging.getLogger(__name__)

#: A step is seconds at most; loading a large model may well take this long.
STALL_SECONDS = 300.0


class StallWatch:
    """Looks at the workers' state now and then, and warns once in each stall."""

    def __init__(self, now: float) -> None:
        self._changed_at = now
        self._state: object = None
        self._has_warned = False

    def look(self, now: float, overview: Overview, rows_done: int) -> None:
        """Takes in the newest state. Times are in seconds, of any clock."""
        steps = {worker: snapshot.step for worker, snapshot in overview.pools.items()}
        state = (steps, overview.num_ready, overview.restarts, rows_done)
        if state != self._state:
            self._state, self._changed_at, self._has_warned = state, now, False
        elif now - self._changed_at >= STALL_SECONDS and not self._has_warned:
            self._has_warned = True
            _log.warning(_warning(duration(now - self._changed_at), overview.num_ready))


def _warning(stalled_for: str, num_ready: int) -> str:
    if num_ready:
        return (
            f"nothing has come from the workers for {stalled_for}: if a machine of the cluster is gone for good, "
            "interrupt this run, and the same command goes on from its journal"
        )
    return f"no worker is up after {stalled_for}: the model takes long to load, or the cluster has no room for a worker"

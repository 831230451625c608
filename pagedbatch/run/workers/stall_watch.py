"""Tells when nothing has come from the workers for long. Knows no Ray, and reads no clock.

Ray waits for a lost machine of a cluster to come back, however long that takes, and so does the run: what to do about
it is for whoever reads the message to say.
"""

from __future__ import annotations

import logging

from pagedbatch.run.workers.ledger import Overview
from pagedbatch.wording import duration

_log = logging.getLogger(__name__)

#: A step is seconds at most; loading a large model may well take this long.
SECONDS_OF_SILENCE = 300.0


class Silence:
    """Looks at the workers' state now and then, and logs a line once in each silence."""

    def __init__(self, now: float) -> None:
        self._heard_at = now
        self._heard: object = None
        self._is_told = False

    def look(self, now: float, overview: Overview, rows_done: int) -> None:
        """Takes in the newest state. Times are in seconds, of any clock."""
        steps = {place: snapshot.step for place, snapshot in overview.pools.items()}
        heard = (steps, overview.num_ready, overview.restarts, rows_done)
        if heard != self._heard:
            self._heard, self._heard_at, self._is_told = heard, now, False
        elif now - self._heard_at >= SECONDS_OF_SILENCE and not self._is_told:
            self._is_told = True
            _log.warning(_words(duration(now - self._heard_at), overview.num_ready))


def _words(silence: str, num_ready: int) -> str:
    if num_ready:
        return (
            f"nothing has come from the workers for {silence}: if a machine of the cluster is gone for good, "
            "interrupt this run, and the same command goes on from its journal"
        )
    return f"no worker is up after {silence}: the model takes long to load, or the cluster has no room for a worker"

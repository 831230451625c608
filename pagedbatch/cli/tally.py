"""How far a run is: rows, tokens, speed and time left. The caller says what time it is."""

from __future__ import annotations

from collections import deque

from pagedbatch.outputs import StepSnapshot

#: The displayed speed is the mean of this time, so that it follows the run without jitter.
RATE_WINDOW_SECONDS = 10.0


class Tally:
    """Counts rows and tokens of a run, and computes speed and time left from them."""

    def __init__(self, total_rows: int, resumed: int) -> None:
        self.total_rows = total_rows
        self.resumed = resumed
        self.rows_finished = 0
        self.rows_error = 0
        self.snapshot: StepSnapshot | None = None
        self._first = 0.0
        self._last = 0.0
        self._marks: deque[tuple[float, int]] = deque()

    def take(self, now: float, snapshot: StepSnapshot | None, rows_finished: int, rows_error: int) -> None:
        """Keeps the newest state. It is called after every step, so it does no more than this."""
        if snapshot is not None:
            if self.snapshot is None:
                self._first = now - snapshot.step_seconds
                self._marks.append((self._first, 0))
            self.snapshot = snapshot
            self._last = now
        self.rows_finished = rows_finished
        self.rows_error = rows_error

    def mark(self) -> None:
        """Notes the tokens so far, from which the recent speed is computed. Called at every redraw."""
        if self.snapshot is None:
            return
        self._marks.append((self._last, self.output_tokens))
        while len(self._marks) > 2 and self._marks[1][0] <= self._last - RATE_WINDOW_SECONDS:
            self._marks.popleft()

    @property
    def rows_done(self) -> int:
        return self.resumed + self.rows_finished

    @property
    def output_tokens(self) -> int:
        return 0 if self.snapshot is None else self.snapshot.counters.output_tokens

    @property
    def preemptions(self) -> int:
        if self.snapshot is None:
            return 0
        return self.snapshot.counters.preemptions_swap + self.snapshot.counters.preemptions_recompute

    @property
    def elapsed(self) -> float:
        """Seconds from the start of the first step to the end of the last one."""
        return self._last - self._first

    @property
    def mean_rate(self) -> float:
        """Output tokens per second since the first step."""
        return self.output_tokens / self.elapsed if self.elapsed > 0 else 0.0

    @property
    def recent_rate(self) -> float:
        """Output tokens per second over the last `RATE_WINDOW_SECONDS`."""
        if len(self._marks) < 2:
            return 0.0
        (since, before), (until, now) = self._marks[0], self._marks[-1]
        return (now - before) / (until - since) if until > since else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Time left, estimated from tokens; None while too little is known.

        Running rows are half done on average, so a row takes tokens / (finished rows + running rows / 2).
        """
        if self.snapshot is None or self.rows_finished == 0 or self.recent_rate <= 0:
            return None
        rows_worth = self.rows_finished + self.snapshot.running_groups / 2
        rows_left = max(0.0, self.total_rows - self.resumed - rows_worth)
        return rows_left * (self.output_tokens / rows_worth) / self.recent_rate

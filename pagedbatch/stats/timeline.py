"""The run over time in a bounded number of points. Knows snapshots; knows no file and no plotting."""

from __future__ import annotations

from typing import Any

from pagedbatch.outputs import StepSnapshot

MAX_POINTS = 512


class _Point:
    """Sums over the steps that a point stands for."""

    __slots__ = ("cached", "filled_slots", "free", "logical", "output_tokens", "preemptions", "private", "running",
                 "seconds", "shared", "step", "steps", "waiting")  # fmt: skip

    def __init__(self, snapshot: StepSnapshot) -> None:
        self.step = snapshot.step
        self.steps = 0
        self.seconds = 0.0
        self.private = self.shared = self.cached = self.free = 0
        self.logical = self.filled_slots = self.running = self.waiting = 0
        self.output_tokens = self.preemptions = 0

    def add(self, snapshot: StepSnapshot) -> None:
        pool = snapshot.pool
        counters = snapshot.counters
        self.steps += 1
        self.seconds += snapshot.step_seconds
        self.private += pool.private
        self.shared += pool.shared
        self.cached += pool.cached
        self.free += pool.free
        self.logical += pool.logical
        self.filled_slots += pool.filled_slots
        self.running += snapshot.running_sequences
        self.waiting += snapshot.waiting_groups
        self.output_tokens = counters.output_tokens
        self.preemptions = counters.preemptions_swap + counters.preemptions_recompute

    def absorb(self, later: _Point) -> None:
        """Takes in the point that follows."""
        self.steps += later.steps
        self.seconds += later.seconds
        self.private += later.private
        self.shared += later.shared
        self.cached += later.cached
        self.free += later.free
        self.logical += later.logical
        self.filled_slots += later.filled_slots
        self.running += later.running
        self.waiting += later.waiting
        self.output_tokens = later.output_tokens
        self.preemptions = later.preemptions


class Timeline:
    """At most `max_points` (even) points of equally many steps each; the last may hold fewer.

    When it is full, neighbours are merged and every point stands for twice as many steps, so that a run of any length
    costs bounded memory and, on average, O(1) a step.
    """

    def __init__(self, max_points: int = MAX_POINTS) -> None:
        self._max_points = max_points
        self._stride = 1
        self._points: list[_Point] = []

    def add(self, snapshot: StepSnapshot) -> None:
        points = self._points
        if not points or points[-1].steps == self._stride:
            if len(points) == self._max_points:
                self._halve()
            points.append(_Point(snapshot))
        points[-1].add(snapshot)

    def _halve(self) -> None:
        for left, right in zip(self._points[::2], self._points[1::2], strict=True):
            left.absorb(right)
        del self._points[1::2]
        self._stride *= 2

    def points(self) -> list[dict[str, Any]]:
        """Points in order of time.

        `step` is the first step of a point, `steps` how many it stands for, `seconds` the run's step time up to its
        end. Blocks by state, `logical` blocks, `filled_slots`, `running` sequences and `waiting` rows are means over
        the point's steps; `output_tokens` and `preemptions` are totals since the start.
        """
        elapsed = 0.0
        rows = []
        for p in self._points:
            elapsed += p.seconds
            means = {
                name: round(getattr(p, name) / p.steps, 2)
                for name in ("private", "shared", "cached", "free", "logical", "filled_slots", "running", "waiting")
            }
            rows.append(
                {"step": p.step, "steps": p.steps, "seconds": round(elapsed, 4)}
                | means
                | {"output_tokens": p.output_tokens, "preemptions": p.preemptions}
            )
        return rows

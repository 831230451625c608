"""The run over time, in a bounded number of points."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from pagedbatch.outputs import BLOCK_STATES, StepSnapshot
from pagedbatch.stats.schema import TimelinePoint

MAX_POINTS = 512

_TOTALS = ("output_tokens", "preemptions")
_GAUGES = (*BLOCK_STATES, "logical", "filled_slots", "running", "waiting")


@dataclass(slots=True)
class _Sums:
    """A point while steps are added to it: sums over them, and the totals after the last."""

    step: int
    steps: int = 0
    seconds: float = 0.0
    private: float = 0.0
    shared: float = 0.0
    cached: float = 0.0
    free: float = 0.0
    logical: float = 0.0
    filled_slots: float = 0.0
    running: float = 0.0
    waiting: float = 0.0
    output_tokens: int = 0
    preemptions: int = 0

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

    def absorb(self, later: _Sums) -> None:
        """Adds the point that follows."""
        self.steps += later.steps
        self.seconds += later.seconds
        for name in _GAUGES:
            setattr(self, name, getattr(self, name) + getattr(later, name))
        self.output_tokens = later.output_tokens
        self.preemptions = later.preemptions


class Timeline:
    """At most `max_points` (even) points of equally many steps each; the last may hold fewer.

    When it is full, neighbours are merged and every point covers twice as many steps, so that a run of any length
    costs bounded memory and, on average, O(1) per step.
    """

    def __init__(self, max_points: int = MAX_POINTS) -> None:
        self._max_points = max_points
        self._stride = 1
        self._points: list[_Sums] = []

    def add(self, snapshot: StepSnapshot) -> None:
        points = self._points
        if not points or points[-1].steps == self._stride:
            if len(points) == self._max_points:
                self._halve()
            points.append(_Sums(snapshot.step))
        points[-1].add(snapshot)

    def _halve(self) -> None:
        for left, right in zip(self._points[::2], self._points[1::2], strict=True):
            left.absorb(right)
        del self._points[1::2]
        self._stride *= 2

    def points(self) -> list[TimelinePoint]:
        elapsed = list(accumulate(point.seconds for point in self._points))
        return [
            TimelinePoint(
                step=point.step,
                steps=point.steps,
                seconds=round(seconds, 4),
                **{name: round(getattr(point, name) / point.steps, 2) for name in _GAUGES},
                output_tokens=point.output_tokens,
                preemptions=point.preemptions,
            )
            for point, seconds in zip(self._points, elapsed, strict=True)
        ]


def merge_sequential(timelines: Sequence[Timeline], max_points: int = MAX_POINTS) -> Timeline:
    """One timeline of pools each of which replaced the one before it. No step can be added afterwards."""
    merged = Timeline(max_points)
    points = merged._points
    for timeline in timelines:
        last = points[-1] if points else _Sums(1)
        for point in copy.deepcopy(timeline._points):
            point.step += last.step + last.steps - 1
            point.output_tokens += last.output_tokens
            point.preemptions += last.preemptions
            points.append(point)
        while len(points) > max_points:
            if len(points) % 2:
                points[-2].absorb(points.pop())
            merged._halve()
    return merged


def merge_concurrent(timelines: Sequence[Timeline]) -> Timeline:
    """One timeline of pools that ran at the same time: gauges are added up that were seen at the same second.

    Each pool's time is that of its steps, so pools that waited, or that started later, are a little out of step. A pool
    that has ended is free.
    """
    elapsed = [sum(point.seconds for point in timeline._points) for timeline in timelines]
    num_points = max((len(timeline._points) for timeline in timelines), default=0)
    width = max(elapsed, default=0.0) / max(1, num_points)
    merged = Timeline()
    merged._points = [_Sums(0) for _ in range(num_points)]
    steps = [0.0] * num_points
    for timeline in timelines:
        _spread(timeline._points, merged._points, steps, width)
    step = 1
    for point, num_steps in zip(merged._points, steps, strict=True):
        point.seconds = width
        point.step, point.steps = step, max(1, round(num_steps))
        step += point.steps
        for name in _GAUGES:  # means so far, where sums over the steps are kept
            setattr(point, name, getattr(point, name) * point.steps)
    return merged


def _spread(points: Sequence[_Sums], bins: Sequence[_Sums], steps: list[float], width: float) -> None:
    """Adds the means of `points`, which last as long as they took, to bins of `width` seconds; their steps likewise."""
    if not points:
        return
    ends = list(accumulate(point.seconds for point in points))
    last = points[-1]
    num_blocks = sum(getattr(last, name) for name in BLOCK_STATES) / last.steps
    place = 0
    for i, target in enumerate(bins):
        begin, end = i * width, (i + 1) * width
        covered = 0.0
        while place < len(points):
            point = points[place]
            overlap = min(end, ends[place]) - max(begin, ends[place] - point.seconds)
            if overlap > 0:
                covered += overlap
                steps[i] += point.steps * overlap / point.seconds
                for name in _GAUGES:
                    mean = getattr(point, name) / point.steps
                    setattr(target, name, getattr(target, name) + mean * overlap / width)
            if ends[place] > end:
                break
            place += 1
        target.free += num_blocks * max(0.0, 1 - covered / width)
        for name in _TOTALS:
            setattr(target, name, getattr(target, name) + _reached(points, ends, place, end, name))


def _reached(points: Sequence[_Sums], ends: Sequence[float], place: int, moment: float, name: str) -> int:
    """A total at `moment`, within the point at `place` or after all of them; it grows evenly within a point."""
    before: int = getattr(points[place - 1], name) if place else 0
    if place == len(points):
        return before
    after: int = getattr(points[place], name)
    return before + round((after - before) * (1 - (ends[place] - moment) / points[place].seconds))

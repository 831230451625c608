"""The waiting and the running groups, in serving order; while a failed step is tried again, only some of them."""

from __future__ import annotations

import bisect
import heapq

from pagedbatch.sequence import GroupState, SequenceGroup


class Queues:
    """Running groups in serving order, waiting ones by the same order.

    While the queues are restricted to some groups, the others are held back: running ones are in `held` and keep their
    blocks.
    """

    def __init__(self) -> None:
        self.running: list[SequenceGroup] = []
        self.held: list[SequenceGroup] = []
        self._waiting: list[tuple[tuple[int, int], SequenceGroup]] = []  # a heap
        self._held_waiting: list[SequenceGroup] = []
        self._allowed: frozenset[int] | None = None  # by arrival; None: all

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._held_waiting)

    @property
    def num_unfinished(self) -> int:
        return self.num_waiting + len(self.running) + len(self.held)

    @property
    def head(self) -> SequenceGroup | None:
        """The group that waits in front."""
        return self._waiting[0][1] if self._waiting else None

    def enqueue(self, group: SequenceGroup) -> None:
        if self._is_allowed(group):
            heapq.heappush(self._waiting, (group.order, group))
        else:
            self._held_waiting.append(group)

    def pop(self) -> None:
        """Takes out the group that waits in front."""
        heapq.heappop(self._waiting)

    def run(self, group: SequenceGroup) -> None:
        group.state = GroupState.RUNNING
        bisect.insort(self.running, group, key=lambda g: g.order)

    def stop(self, group: SequenceGroup) -> None:
        """Takes out a group that runs or is held."""
        queue = self.running if self._is_allowed(group) else self.held
        queue.remove(group)

    def pop_victim(self, first_victim: int) -> SequenceGroup | None:
        """Takes out the group to preempt: the last held one, else the last of those that run from `first_victim` on."""
        if self.held:
            return self.held.pop()
        return self.running.pop() if len(self.running) > first_victim else None

    def withdraw(self, group: SequenceGroup) -> None:
        """Takes out a group that waits."""
        self._waiting = [entry for entry in self._waiting if entry[1] is not group]
        heapq.heapify(self._waiting)

    def restrict_to(self, groups: list[SequenceGroup] | None) -> None:
        """Until the next call these groups alone wait and run; None: all do."""
        self._allowed = None if groups is None else frozenset(group.arrival for group in groups)
        waiting = [group for _, group in self._waiting] + self._held_waiting
        running = sorted(self.running + self.held, key=lambda group: group.order)
        self._waiting, self._held_waiting = [], []
        for group in waiting:
            self.enqueue(group)
        self.running = [group for group in running if self._is_allowed(group)]
        self.held = [group for group in running if not self._is_allowed(group)]

    def _is_allowed(self, group: SequenceGroup) -> bool:
        return self._allowed is None or group.arrival in self._allowed

"""The queues alone: serving order, who gives way, and what a restriction to some groups does and undoes."""

from __future__ import annotations

import pytest
from fake_runs import request

from pagedbatch.engine.queues import Queues
from pagedbatch.sequence import GroupState, SequenceGroup


def group(arrival: int, priority: int = 0) -> SequenceGroup:
    return SequenceGroup(request(arrival, 4, priority=priority), arrival, max_width=1)


@pytest.fixture
def groups() -> list[SequenceGroup]:
    return [group(arrival) for arrival in range(6)]


def drained(queues: Queues) -> list[int]:
    """The arrivals of the waiting groups in the order in which they are served."""
    found = []
    while (head := queues.head) is not None:
        found.append(head.arrival)
        queues.pop()
    return found


def test_lower_priorities_first_then_older_ones() -> None:
    queues = Queues()
    for each in (group(3), group(0, priority=1), group(1), group(2, priority=-1)):
        queues.enqueue(each)
    assert drained(queues) == [2, 1, 3, 0]


def test_running_groups_are_in_serving_order(groups: list[SequenceGroup]) -> None:
    queues = Queues()
    for arrival in (2, 0, 1):
        groups[arrival].state = GroupState.SWAPPED
        queues.run(groups[arrival])
    assert queues.running == groups[:3]
    assert {each.state for each in groups[:3]} == {GroupState.RUNNING}


def test_every_group_inside_is_counted_once(groups: list[SequenceGroup]) -> None:
    queues = Queues()
    for each in groups[:3]:
        queues.enqueue(each)
    for each in groups[3:]:
        queues.run(each)
    for restriction in (None, [groups[0], groups[3]], [], None):
        queues.restrict_to(restriction)
        assert (queues.num_waiting, queues.num_unfinished) == (3, 6)


def test_a_restriction_holds_the_others_back_until_the_next(groups: list[SequenceGroup]) -> None:
    queues = Queues()
    for each in groups[:3]:
        queues.enqueue(each)
    for each in groups[3:]:
        queues.run(each)
    queues.restrict_to([groups[1], groups[4]])
    assert queues.head is groups[1]
    assert (queues.running, queues.held) == ([groups[4]], [groups[3], groups[5]])
    queues.enqueue(new := group(6))
    assert drained(queues) == [1]
    queues.restrict_to(None)
    assert (queues.running, queues.held) == (groups[3:], [])
    assert drained(queues) == [0, 2, new.arrival]


def test_who_runs_and_who_is_held_can_be_stopped(groups: list[SequenceGroup]) -> None:
    queues = Queues()
    for each in groups[:4]:
        queues.run(each)
    queues.restrict_to(groups[:2])
    queues.stop(groups[0])
    queues.stop(groups[3])
    assert (queues.running, queues.held) == ([groups[1]], [groups[2]])


def test_the_held_give_way_first_then_the_last_that_may(groups: list[SequenceGroup]) -> None:
    queues = Queues()
    for each in groups[:4]:
        queues.run(each)
    queues.restrict_to(groups[:2])
    victims = [queues.pop_victim(first_victim=1) for _ in range(4)]
    assert victims == [groups[3], groups[2], groups[1], None]
    assert queues.running == [groups[0]]


@pytest.mark.parametrize("withdrawn", range(6))
def test_the_others_keep_their_order_when_one_is_withdrawn(withdrawn: int) -> None:
    """Removing from the middle of a heap does not leave a heap: these priorities show it."""
    queues = Queues()
    found = [group(arrival, priority) for arrival, priority in enumerate((0, 10, 1, 11, 12, 2))]
    for each in found:
        queues.enqueue(each)
    queues.withdraw(found[withdrawn])
    assert drained(queues) == [arrival for arrival in (0, 2, 5, 1, 3, 4) if arrival != withdrawn]

"""Reading ahead: in order, bounded, errors in their place, and no thread left behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import count, islice

import pytest

from pagedbatch.input.prefetch import ReadAhead


@pytest.mark.parametrize("num_items", [0, 1, 15, 16, 17, 1000])
@pytest.mark.parametrize("most", [1, 2, 8, 256])
def test_all_items_come_in_order(num_items: int, most: int) -> None:
    with ReadAhead(iter(range(num_items)), most) as items:
        assert list(items) == list(range(num_items))


@pytest.mark.parametrize("most", [2, 8, 256])
def test_it_stays_within_its_bound(most: int) -> None:
    taken = 0
    drawn: list[int] = []

    def source() -> Iterator[int]:
        for i in range(2000):
            drawn.append(i - taken)
            yield i

    with ReadAhead(source(), most) as items:
        for _ in items:
            taken += 1
    assert max(drawn) <= 2 * most + 1


def test_an_error_comes_after_what_was_read_before_it() -> None:
    def source() -> Iterator[int]:
        yield from range(32)
        raise OSError("gone")

    with ReadAhead(source(), 64) as items:
        taken = iter(items)
        assert list(islice(taken, 32)) == list(range(32))
        with pytest.raises(OSError, match="gone"):
            next(taken)


def test_leaving_early_ends_the_thread() -> None:
    with ReadAhead(count(), 8) as items:
        assert list(islice(items, 3)) == [0, 1, 2]
    assert not [thread for thread in threading.enumerate() if thread.name == "feeder"]


def test_while_an_item_takes_long_the_taker_is_told_and_has_those_before() -> None:
    go_on = threading.Event()

    def source() -> Iterator[int | None]:
        yield from range(3)
        while not go_on.is_set():
            yield None
        yield 3

    with ReadAhead(source(), 256) as items:
        taken = iter(items)
        assert list(islice(taken, 3)) == [0, 1, 2]
        assert next(taken) is None
        assert not items.is_over
        go_on.set()
        assert [each for each in taken if each is not None] == [3]
        assert items.is_over


def test_a_taker_that_is_no_longer_wanted_stops_waiting() -> None:
    ended = threading.Event()

    def source() -> Iterator[int]:
        ended.wait()
        yield from ()

    with ReadAhead(source(), 8, cancel=ended.set, is_wanted=iter([True, False]).__next__) as items:
        assert list(items) == []
        assert not items.is_over

"""Groups of rows, the unit of work that goes to a worker and comes back.

A group is consecutive rows: rows with a common prefix are mostly neighbours in an input, and so meet in one engine,
which computes the prefix once. Which rows share a prefix is known only when the workers tokenize them.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from pagedbatch.input.row import Row
from pagedbatch.output.finished_row import FinishedRow

_MAX_GROUP_ROWS = 64
#: Enough groups per worker that all workers end at about the same time.
_MIN_GROUPS_PER_WORKER = 4


@dataclass(frozen=True, slots=True)
class GroupSizes:
    """`rows` per group, and the number of groups inside a worker: a few run and a few wait, none of them long."""

    rows: int
    groups_in_engine: int


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """The finished rows of a group, and the worker that ran them."""

    worker: str
    rows: list[FinishedRow]


def choose_sizes(*, max_num_seqs: int, width: int, num_rows: int, num_workers: int) -> GroupSizes:
    """Four groups fill an engine, and four more wait.

    Args:
        width: sequences that a plain row needs at once.
        num_rows: rows still to be run.
    """
    at_once = max(1, max_num_seqs // width)
    rows = max(1, min(at_once // 4, _MAX_GROUP_ROWS, num_rows // (_MIN_GROUPS_PER_WORKER * num_workers)))
    return GroupSizes(rows, min(64, max(2, -(-2 * at_once // rows))))


def groups(rows: Iterable[Row], size: int) -> Iterator[list[Row]]:
    """`rows` in groups of `size`; the last may be smaller."""
    remaining = iter(rows)
    while group := list(islice(remaining, size)):
        yield group


def pack(thing: list[Row] | FinishedGroup) -> bytes:
    """The bytes that travel between the processes of one run."""
    return pickle.dumps(thing, pickle.HIGHEST_PROTOCOL)

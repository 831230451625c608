"""Groups of rows, the unit that goes to a worker, and their answers. Knows no Ray and no engine.

A group is rows that follow each other: rows with a common beginning mostly stand together in an input, and so they meet
in one engine, which computes it once. Which rows share what is known only when they are tokenised, in the workers.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from pagedbatch.input.row import Row
from pagedbatch.output.finished_row import Answer

_MOST_ROWS = 64
#: An input is parted into so many groups a worker at least, so that all end at about the same time.
_LEAST_GROUPS = 4


@dataclass(frozen=True, slots=True)
class Sizes:
    """`rows` a group, and how many groups are in a worker at a time: a few run, a few wait, and none of them long."""

    rows: int
    groups_in_engine: int


@dataclass(frozen=True, slots=True)
class GroupAnswers:
    """The answers of a group, and which worker gave them."""

    worker: str
    answers: list[Answer]


def choose_sizes(*, max_num_seqs: int, width: int, num_rows: int, num_workers: int) -> Sizes:
    """Four groups fill an engine, and as many wait beside it.

    Args:
        width: sequences that a plain row needs at once.
        num_rows: rows still to be answered.
    """
    at_once = max(1, max_num_seqs // width)
    rows = max(1, min(at_once // 4, _MOST_ROWS, num_rows // (_LEAST_GROUPS * num_workers)))
    return Sizes(rows, min(64, max(2, -(-2 * at_once // rows))))


def groups(rows: Iterable[Row], size: int) -> Iterator[list[Row]]:
    """`rows` in groups of `size`; the last may be smaller."""
    remaining = iter(rows)
    while group := list(islice(remaining, size)):
        yield group


def pack(thing: list[Row] | GroupAnswers) -> bytes:
    """As it travels between the processes of one run."""
    return pickle.dumps(thing, pickle.HIGHEST_PROTOCOL)


def unpack_rows(data: bytes) -> list[Row]:
    rows: list[Row] = pickle.loads(data)
    return rows


def unpack_answers(data: bytes) -> GroupAnswers:
    answers: GroupAnswers = pickle.loads(data)
    return answers

"""Groups of rows: every row in one, in order; sizes that fill an engine and leave something for each worker."""

from __future__ import annotations

import pickle

from hypothesis import given
from hypothesis import strategies as st

from pagedbatch.input.row import Row
from pagedbatch.output.finished_row import FinishedRow
from pagedbatch.run.workers.groups import FinishedGroup, choose_sizes, groups, pack


def rows(count: int) -> list[Row]:
    return [Row(index, f"id {index}", True, {"prompt": "x", "n": 2}, line=index + 1) for index in range(count)]


@given(st.integers(0, 50), st.integers(1, 60))
def test_every_row_is_in_one_group_in_order(count: int, size: int) -> None:
    found = list(groups(iter(rows(count)), size))
    assert [row for group in found for row in group] == rows(count)
    assert all(len(group) == size for group in found[:-1])
    assert all(found)


def test_rows_are_read_no_further_than_the_group_that_is_asked_for() -> None:
    read: list[int] = []

    def input_rows() -> object:
        for row in rows(10):
            read.append(row.index)
            yield row

    next(groups(input_rows(), 3))  # type: ignore[arg-type]
    assert read == [0, 1, 2]


def test_a_group_travels_unchanged_both_ways() -> None:
    group = FinishedGroup("worker", [FinishedRow(3, b'{"id": 3}', True, 4, 5), FinishedRow(4, b"{}", False)])
    assert pickle.loads(pack(rows(3))) == rows(3)
    assert pickle.loads(pack(group)) == group


@given(st.integers(1, 512), st.integers(1, 600), st.integers(0, 10**9), st.integers(1, 64))
def test_sizes_fill_the_engine_and_are_bounded(max_num_seqs: int, width: int, num_rows: int, num_workers: int) -> None:
    sizes = choose_sizes(max_num_seqs=max_num_seqs, width=width, num_rows=num_rows, num_workers=num_workers)
    at_once = max(1, max_num_seqs // width)
    assert 1 <= sizes.rows <= 64
    assert 2 <= sizes.groups_in_engine <= 64
    assert sizes.rows * sizes.groups_in_engine >= min(2 * at_once, 64), "as many rows wait as run"
    assert sizes.rows == 1 or num_rows >= 4 * num_workers * sizes.rows, "there are four groups for each worker"


def test_sizes_of_ordinary_runs() -> None:
    def sizes(**given: int) -> tuple[int, int]:
        chosen = choose_sizes(**{"max_num_seqs": 128, "width": 1, "num_rows": 10**6, "num_workers": 2, **given})
        return chosen.rows, chosen.groups_in_engine

    assert sizes() == (32, 8)
    assert sizes(width=8) == (4, 8)
    assert sizes(width=512) == (1, 2), "wider than the engine: its samples take turns"
    assert sizes(num_rows=40) == (5, 52)

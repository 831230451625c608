"""Traces: their columns, and what a row must hold."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from pagedbatch.errors import UsageError
from pagedbatch.tools.simulate.trace import RequestLengths
from pagedbatch.tools.simulate.trace_file import TraceColumns, read_trace


def write_csv(path: Path, *rows: tuple[Any, ...]) -> str:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return str(path)


def read(path: str, limit: int | None = None, **columns: str) -> list[RequestLengths]:
    return list(read_trace(path, TraceColumns(**columns), limit))


def test_columns_are_found_or_named(tmp_path: Path) -> None:
    known = write_csv(
        tmp_path / "known.csv", ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), ("x", 7, 3), ("y", 0, 0)
    )
    assert read(known) == [RequestLengths(7, 3), RequestLengths(0, 0)]
    assert read(known, limit=1) == [RequestLengths(7, 3)]
    own = write_csv(tmp_path / "own.csv", ("in", "out"), (7, 3))
    assert read(own, input="in", output="out") == [RequestLengths(7, 3)]
    with pytest.raises(UsageError, match=r"name the column with --input-column; there are in, out"):
        read(own)
    with pytest.raises(UsageError, match=r"--output-column o: .* has in, out"):
        read(own, input="in", output="o")


@pytest.mark.parametrize("value", ["-1", "many", "", "1.5"])
def test_a_length_that_is_none_is_told_with_its_row(tmp_path: Path, value: str) -> None:
    trace = write_csv(tmp_path / "t.csv", ("input_length", "output_length"), (5, 5), (5, value))
    with pytest.raises(UsageError, match=r"t\.csv, (row|line) \d: output_length is .*, not a number of tokens"):
        read(trace)


def test_a_list_has_a_length_for_each_sample(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    rows = [{"input_length": 5, "output_length": lengths} for lengths in ([3, 9, 0], 4, [-1])]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read(str(trace), limit=2) == [RequestLengths(5, 9, sample_tokens=(3, 9, 0)), RequestLengths(5, 4)]
    with pytest.raises(UsageError, match=r"output_length is -1, not a number"):
        read(str(trace))


def test_rows_with_one_value_have_a_prefix_in_common(tmp_path: Path) -> None:
    rows = ((50, 1, "a", 30), (50, 1, "b", 30), (20, 1, "a", 30))
    trace = write_csv(tmp_path / "t.csv", ("input_length", "output_length", "few", "common"), *rows)

    def prefixes(**columns: str) -> list[tuple[int, int]]:
        return [(row.prefix, row.prefix_tokens) for row in read(trace, **columns)]

    assert prefixes() == [(0, 0)] * 3
    assert prefixes(prefix="few", prefix_length="common") == [(0, 30), (1, 30), (0, 20)]
    assert prefixes(prefix_length="40") == [(0, 40), (0, 40), (0, 20)], "a number, and all rows begin alike"
    with pytest.raises(UsageError, match="--prefix-column needs --prefix-length"):
        prefixes(prefix="few")
    with pytest.raises(UsageError, match=r"--prefix-length comon: .* has input_length"):
        prefixes(prefix_length="comon")

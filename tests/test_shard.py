"""Runs of one slice of the input: which rows they answer, what they keep for a resume, what they refuse."""

from __future__ import annotations

import gzip
import io
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_job import ROWS, JobFolder

from pagedbatch.errors import UsageError
from pagedbatch.input.files import jsonl
from pagedbatch.input.reader import ReadOptions, open_source
from pagedbatch.settings import merge
from pagedbatch.shard import Shard, name_rows


def _interrupt() -> Callable[[int], None]:
    """Sends one SIGINT, once rows are done."""
    sent: list[int] = []

    def interrupt(rows_done: int) -> None:
        if rows_done and not sent:
            sent.append(rows_done)
            os.kill(os.getpid(), signal.SIGINT)

    return interrupt


@pytest.fixture
def folder(tmp_path: Path) -> JobFolder:
    return JobFolder(tmp_path)


@given(num_rows=st.integers(0, 10**12), count=st.integers(1, 10**5), data=st.data())
def test_neighbouring_shards_touch_and_differ_by_a_row_at_most(num_rows: int, count: int, data: Any) -> None:
    index = data.draw(st.integers(0, count - 1))
    rows = Shard(index, count).rows(num_rows)
    assert len(rows) in (num_rows // count, -(-num_rows // count))
    assert rows.start == (Shard(index - 1, count).rows(num_rows).stop if index else 0)
    assert index < count - 1 or rows.stop == num_rows


@given(num_rows=st.integers(0, 60), count=st.integers(1, 90))
def test_every_row_is_in_exactly_one_shard(num_rows: int, count: int) -> None:
    rows = [row for index in range(count) for row in Shard(index, count).rows(num_rows)]
    assert rows == list(range(num_rows))
    assert all(row in Shard.of_row(row, num_rows, count).rows(num_rows) for row in rows)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("4/4", "--shard 4/4: shards count from 0, and the last of 4 is 3/4"),
        ("0/0", "--shard 0/0: shards count from 0, and there must be at least one"),
        ("1", "--shard must be I/N, such as 0/4 for the first of four, got '1'"),
        ("-1/4", "--shard must be I/N, such as 0/4 for the first of four, got '-1/4'"),
        ("/", "--shard must be I/N, such as 0/4 for the first of four, got '/'"),
        (2, "--shard must be I/N, such as 0/4 for the first of four, got 2"),
    ],
)
def test_what_names_no_shard_is_refused(value: Any, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        merge({"input": "i", "model": "m", "output": "o", "shard": value}, {})
    assert str(refused.value) == message


def test_rows_are_named_with_both_ends() -> None:
    assert [name_rows(range(3, 8)), name_rows(range(3, 4)), name_rows(range(3, 3))] == ["3-7", "3", "none"]


def test_the_shards_one_after_the_other_are_the_whole(folder: JobFolder) -> None:
    assert folder.run("whole.jsonl").exit_code == 3
    codes = [folder.run(f"{i}.jsonl", shard=f"{i}/3").exit_code for i in range(3)]
    assert codes == [0, 0, 3]
    assert b"".join(folder.read(f"{i}.jsonl") for i in range(3)) == folder.read("whole.jsonl")
    assert [folder.stats(str(i))["rows"]["total"] for i in range(3)] == [3, 3, 4]
    assert "shard" not in folder.stats("whole")


def test_more_shards_than_rows_leave_some_empty(folder: JobFolder) -> None:
    folder.write(ROWS[:2])
    assert [folder.run(f"{i}.jsonl", shard=f"{i}/3").exit_code for i in range(3)] == [0, 0, 0]
    assert [len(folder.read(f"{i}.jsonl").splitlines()) for i in range(3)] == [0, 1, 1]


def test_the_limit_comes_before_the_shards_and_leaves_no_journal(folder: JobFolder) -> None:
    folder.run("1.jsonl", shard="1/2", limit=6)
    assert [json.loads(line)["id"] for line in folder.read("1.jsonl").splitlines()] == ["r3", "r4", "r5"]
    assert {path.name for path in folder.path.iterdir()} == {"in.jsonl", "1.jsonl", "1.stats.json"}


def test_a_stream_is_sharded_like_a_file(folder: JobFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.run("file.jsonl", shard="1/2")
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(folder.read("in.jsonl"))))
    folder.run("stream.jsonl", shard="1/2", input="-")
    assert folder.read("stream.jsonl") == folder.read("file.jsonl")


def test_an_id_that_stands_in_two_shards_is_found_by_each(folder: JobFolder) -> None:
    folder.write([*ROWS, ROWS[0]])
    for shard in ("0/2", "1/2"):
        with pytest.raises(UsageError, match=r"'r0' in lines 1, 11"):
            folder.run("out.jsonl", shard=shard)


def test_stdout_is_refused(folder: JobFolder) -> None:
    with pytest.raises(UsageError, match="--shard needs a file as --output"):
        folder.run("-", shard="0/2")


def test_a_killed_shard_goes_on_and_another_one_is_refused_its_journal(folder: JobFolder) -> None:
    folder.run("whole.jsonl", shard="1/2")
    whole = folder.read("whole.jsonl")

    assert folder.run("out.jsonl", _interrupt(), shard="1/2").exit_code == 130
    for other, was in (("0/2", "0-4"), ("1/5", "2-3")):
        message = rf"shard: was '1/2', now '{other}'; rows: was '5-9 of 10', now '{was} of 10'"
        with pytest.raises(UsageError, match=message):
            folder.run("out.jsonl", shard=other)
    with pytest.raises(UsageError, match=r"shard: was '1/2', now None"):
        folder.run("out.jsonl")
    folder.notices.clear()
    assert folder.run("out.jsonl", shard="1/2").exit_code == 3
    assert folder.notices[0].startswith("resuming: ")
    assert folder.notices[0].endswith(" finished already")
    assert folder.read("out.jsonl") == whole


def test_an_input_that_grew_moves_the_rows_and_is_refused(folder: JobFolder) -> None:
    assert folder.run("out.jsonl", _interrupt(), shard="0/2").exit_code == 130
    folder.write([*ROWS, {"prompt": "x"}, {"prompt": "y"}])
    with pytest.raises(UsageError, match=r"rows: was '0-4 of 10', now '0-5 of 12'"):
        folder.run("out.jsonl", shard="0/2")


def test_error_rows_of_a_shard_are_retried(folder: JobFolder) -> None:
    assert folder.run("out.jsonl", shard="1/2").exit_code == 3
    before = folder.read("out.jsonl")
    folder.notices.clear()
    assert folder.run("out.jsonl", shard="1/2", retry_errors=True).exit_code == 3
    assert folder.notices[:2] == ["1 error row runs again", "resuming: 4 of 5 rows are finished already"]
    assert folder.read("out.jsonl") == before


LINES = b'\xef\xbb\xbf{"prompt": "a"}\n\n  \n{"prompt": \n{"prompt": "' + b"c" * 80 + b'"}\n[1]\r\n{"prompt": "e"}'
CELLS = b'id,prompt\n1,"two\nlines"\n2,"bad"x\n3,c\n4,d,e\n5,f'


def _write_parquet(path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"prompt": [f"p{i}" for i in range(3000)]}), path, row_group_size=700)


def _save_dataset(path: Path) -> None:
    import datasets

    datasets.Dataset.from_dict({"prompt": [f"p{i}" for i in range(2100)]}).save_to_disk(path)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("in.jsonl", lambda path: path.write_bytes(LINES)),
        ("in.jsonl.gz", lambda path: path.write_bytes(gzip.compress(LINES))),
        ("cut.jsonl.gz", lambda path: path.write_bytes(gzip.compress(os.urandom(9) + LINES * 400)[:-20])),
        ("in.csv", lambda path: path.write_bytes(CELLS)),
        ("in.parquet", _write_parquet),
        ("set", _save_dataset),
    ],
)
def test_reading_from_a_row_on_is_reading_all_and_dropping_some(
    tmp_path: Path, name: str, make: Callable[[Path], Any]
) -> None:
    make(tmp_path / name)
    source = open_source(str(tmp_path / name), ReadOptions(max_line_bytes=64))
    rows = list(source.rows())
    assert len(rows) >= 4
    for first in {0, 1, 2, 3, 1023, 1024, 1500, len(rows) - 1, len(rows), len(rows) + 1}:
        assert list(source.rows(first=first)) == rows[first:]
        assert list(source.rows(first + 2, first=first)) == rows[first : first + 2]


def test_rows_before_the_first_are_not_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(f'{{"prompt": "{i}"}}\n' for i in range(50)))
    parsed: list[int] = []
    real = jsonl.parse_row

    def parse(raw: bytes, number: int) -> Any:
        parsed.append(number)
        return real(raw, number)

    monkeypatch.setattr(jsonl, "parse_row", parse)
    assert [row.index for row in open_source(str(path)).rows(45, first=40)] == [40, 41, 42, 43, 44]
    assert parsed == [41, 42, 43, 44, 45]

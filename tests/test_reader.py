"""Rows from every kind of input: what is fine, what is one row's error, what stops the run before it starts."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from pagedbatch.errors import UsageError
from pagedbatch.input.files.jsonl import read_jsonl
from pagedbatch.input.reader import MAX_LINE_BYTES, ReadOptions, open_source, survey
from pagedbatch.input.row import RawRow, id_hash

ROWS = [{"id": "a", "prompt": "one"}, {"id": 2, "prompt": "zwei: é中文😀\u2028\x85"}]
PLAIN = b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in ROWS)


def _read(data: bytes, **options: Any) -> list[RawRow]:
    return list(read_jsonl(io.BytesIO(data), **{"max_line_bytes": MAX_LINE_BYTES, **options}))


def _write(folder: Path, name: str, data: bytes) -> str:
    path = folder / name
    path.write_bytes(data)
    return str(path)


def _fields(name: str, **options: Any) -> list[dict[str, Any]]:
    return [dict(row.fields) for row in open_source(name, ReadOptions(**options)).rows()]


@pytest.mark.parametrize(
    "data",
    [
        PLAIN,
        codecs.BOM_UTF8 + PLAIN,
        PLAIN.replace(b"\n", b"\r\n"),
        b"\n" + PLAIN.replace(b"\n", b"\n\n \t\r\n"),
        PLAIN.rstrip(b"\n"),
    ],
    ids=["plain", "bom", "crlf", "blank lines", "no final newline"],
)
def test_line_ends_and_marks_do_not_matter(tmp_path: Path, data: bytes) -> None:
    assert _fields(_write(tmp_path, "in.jsonl", data)) == ROWS


@given(st.lists(st.dictionaries(st.text(), st.none() | st.integers() | st.text())), st.sampled_from(["\n", "\r\n"]))
def test_a_record_ends_at_a_line_feed_and_nowhere_else(rows: list[dict[str, Any]], end: str) -> None:
    data = "".join(json.dumps(row) + end for row in rows).encode()
    assert [(row.fields, row.error) for row in _read(data)] == [(row, None) for row in rows]


@pytest.mark.parametrize(
    ("line", "reason", "readable_id"),
    [
        (b'{"id": "3", "prompt":', "malformed JSON", "3"),
        (b'{"id": 3, "prompt": nope}', "malformed JSON", 3),
        (b'{"prompt": "x', "malformed JSON", None),
        (b'{"id": "q\\"', "malformed JSON", None),
        (b'{"id": "3", "temperature": NaN}', "NaN is not JSON", "3"),
        (b'{"id": "3", "prompt": "\xff"}', "byte 24 is not UTF-8", "3"),
        (b"[" * 100_000, "malformed JSON", None),
        (b'{"prompt": ' + b"1" * 5000 + b"}", "malformed JSON", None),
        (b'{"id": "3", "temperature": -1e999}', "-1e999 is too large for a number", "3"),
        (b'{"id": "3", "prompt": "a", "prompt": "b"}', "the key 'prompt' stands twice", "3"),
        (b'{"id": "3", "meta": {"k": 1, "k": 1}}', "the key 'k' stands twice", "3"),
        (b'{"id": "3", "meta": ' + b"[" * 101 + b"]" * 101 + b"}", "nested more than 100 deep", "3"),
        (b'\x0b{"prompt": "x"}', "malformed JSON: Expecting value at column 1", None),
        (b"\x0b", "malformed JSON", None),
        (b'{"prompt": "x"}\x85', "byte 16 is not UTF-8", None),
        (b'["a"]', "must be a JSON object, got a list", None),
        (b'"a"', "must be a JSON object, got a string", None),
        (b"null", "must be a JSON object, got null", None),
        (b'{"id": "3", "prompt": "' + b"x" * 200_000 + b'"}', "longer than 150000 bytes", "3"),
    ],
)
def test_a_broken_line_is_one_error_row(line: bytes, reason: str, readable_id: object) -> None:
    good = b'{"prompt": "fine"}\n'
    before, broken, after = _read(good + line + b"\n" + good, max_line_bytes=150_000)
    assert before.fields == after.fields == {"prompt": "fine"}
    assert broken.error is not None
    assert reason in broken.error
    assert (broken.line, broken.readable_id, broken.fields) == (2, readable_id, {})
    assert after.line == 3


def test_rows_may_hold_what_other_readers_take_for_a_line_end() -> None:
    text = "a\u2028b\u2029c\x85d\x0be\x0cf\x1eg"
    line = json.dumps({"prompt": text}, ensure_ascii=False)
    escaped = line.replace("\\u000b", "\\u000B")
    assert [row.fields["prompt"] for row in _read(f"{line}\n{escaped}\n".encode())] == [text, text]


def test_half_a_surrogate_pair_is_read_as_it_is_written() -> None:
    (row,) = _read(b'{"prompt": "\\ud800", "flat": ' + b"[" + b"[1]," * 200 + b"1]}")
    assert row.fields["prompt"] == "\ud800"


def test_a_line_that_is_too_long_is_never_held() -> None:
    held: list[int] = []

    class Watched(io.BytesIO):
        def readline(self, size: int | None = -1, /) -> bytes:
            held.append(size or 0)
            return super().readline(size)

    data = b'{"prompt": "fine"}\n{"id": 1, "prompt": "' + b"x" * 5_000_000 + b'"}\n{"prompt": "fine"}\n'
    rows = list(read_jsonl(Watched(data), max_line_bytes=1000))
    assert [row.error for row in rows] == [None, "longer than 1000 bytes (--max-line-bytes)", None]
    assert rows[1].readable_id == 1
    assert 0 < min(held) <= max(held) <= 1 << 16


def test_column_numbers_count_in_the_line() -> None:
    (row,) = _read(b'{"id":"3","prompt":\n')
    assert row.error == "malformed JSON: Expecting value at column 20"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_other_encodings_are_refused_with_the_way_out(tmp_path: Path, encoding: str) -> None:
    name = _write(tmp_path, "in.jsonl", PLAIN.decode().encode(encoding))
    with pytest.raises(UsageError, match=r"line 1: this is UTF-16 or UTF-32: convert it first \(iconv"):
        open_source(name)


@pytest.mark.parametrize("name", ["in.jsonl.gz", "in.jsonl", "in.csv"])
@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
def test_compression_is_told_by_content(tmp_path: Path, name: str, compress: Any) -> None:
    assert _fields(_write(tmp_path, name, compress(PLAIN))) == ROWS


def test_compressed_parts_follow_each_other(tmp_path: Path) -> None:
    for compress in (gzip.compress, zstandard.compress):
        parts = [compress(line) for line in PLAIN.splitlines(keepends=True)]
        assert _fields(_write(tmp_path, "parts", b"".join(parts))) == ROWS


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
def test_a_cut_compressed_file_gives_its_rows_and_an_error(tmp_path: Path, compress: Any) -> None:
    lines = [json.dumps({"id": i, "prompt": os.urandom(30).hex()}).encode() + b"\n" for i in range(20_000)]
    data = compress(b"".join(lines))
    rows = list(open_source(_write(tmp_path, "cut", data[: len(data) // 2])).rows())
    *whole, last = rows
    assert len(whole) > 1000
    assert [row.id for row in whole] == list(range(len(whole)))
    assert last.error is not None
    assert last.error.startswith(f"line {len(whole) + 1}: the input breaks off here")


def test_zstd_without_its_package_is_one_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = _write(tmp_path, "in.jsonl.zst", zstandard.compress(PLAIN))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UsageError, match="pip install zstandard"):
        open_source(name)


def test_csv_cells_are_text_but_for_parameters(tmp_path: Path) -> None:
    table = 'id,prompt,temperature,stop,note\n01,"a, ""b""\nc",0.5,12,\nx,,,,7\n'
    name = _write(tmp_path, "in.csv", codecs.BOM_UTF8 + table.encode())
    rows = list(open_source(name).rows())
    assert dict(rows[0].fields) == {"id": "01", "prompt": 'a, "b"\nc', "temperature": 0.5, "stop": "12", "note": None}
    assert dict(rows[1].fields) == {"id": "x", "prompt": "", "temperature": None, "stop": None, "note": "7"}
    assert [row.line for row in rows] == [2, 4]
    assert open_source(name).columns == ("id", "prompt", "temperature", "stop", "note")


def test_csv_is_told_by_its_header_and_broken_rows_stay_alone(tmp_path: Path) -> None:
    rows = list(open_source(_write(tmp_path, "in", b"prompt,id\na,1\nb,2,3\nc,4\n")).rows())
    assert [row.id for row in rows] == ["1", None, "4"]
    assert rows[1].error == "line 3: more cells than the header has columns"


def test_csv_rows_that_are_not_utf_8_stay_alone(tmp_path: Path) -> None:
    rows = list(open_source(_write(tmp_path, "in.csv", b"prompt,id\na,1\n\xff,2\nb,3\n")).rows())
    assert [(row.id, row.error) for row in rows] == [("1", None), (None, "line 3: not UTF-8"), ("3", None)]


def test_csv_lines_that_are_too_long_stay_alone(tmp_path: Path) -> None:
    name = _write(tmp_path, "in.csv", b"prompt,id\nfine,1\n" + b"x" * 100_000 + b',2\n"a\nb",3\nfine,4\n')
    rows = list(open_source(name, ReadOptions(max_line_bytes=1000)).rows())
    assert [(row.id, row.line) for row in rows] == [("1", 2), (None, 3), ("3", 4), ("4", 6)]
    assert rows[1].error == "line 3: malformed CSV: a row longer than 1000 characters (--max-line-bytes)"
    rows = list(open_source(_write(tmp_path, "in.csv", b'prompt\nfine\n"open\nend\n')).rows())
    assert [row.error for row in rows] == [None, "line 3: malformed CSV: unexpected end of data"]


def test_stdin_and_pipes_can_be_read_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(gzip.compress(PLAIN))))
    stdin = open_source("-")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(PLAIN,))
    writer.start()
    piped = open_source(str(pipe))
    writer.join()
    for source in (stdin, piped):
        assert [dict(row.fields) for row in source.rows()] == ROWS
        assert [dict(row.fields) for row in source.rows()] == ROWS


def test_parquet(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    path = tmp_path / "in.jsonl"  # told by content
    parquet.write_table(pa.table({"id": [1, 2], "prompt": ["a", None], "n": [None, 2]}), path)
    source = open_source(str(path))
    assert source.columns == ("id", "prompt", "n")
    assert [dict(row.fields) for row in source.rows()][1] == {"id": 2, "prompt": None, "n": 2}
    assert [row.place for row in source.rows()] == ["row 0", "row 1"]
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UsageError, match="is not a readable Parquet file"):
        open_source(str(path))


@pytest.fixture
def dataset() -> Any:
    import datasets

    return datasets.Dataset.from_dict({"problem": ["a", "b", "c"], "meta": [{"x": 1}, None, {"x": 3}]})


def test_a_saved_dataset(tmp_path: Path, dataset: Any) -> None:
    dataset.save_to_disk(tmp_path / "saved")
    source = open_source(str(tmp_path / "saved"))
    assert source.columns == ("problem", "meta")
    assert [dict(row.fields) for row in source.rows(limit=2)] == [
        {"problem": "a", "meta": {"x": 1}},
        {"problem": "b", "meta": None},
    ]
    assert open_source(str(tmp_path / "saved")).content == source.content
    with pytest.raises(UsageError, match="one dataset without splits: leave --split out"):
        open_source(str(tmp_path / "saved"), ReadOptions(split="test"))


def test_the_splits_of_a_saved_dataset(tmp_path: Path, dataset: Any) -> None:
    import datasets

    datasets.DatasetDict({"train": dataset, "test": dataset.select([2])}).save_to_disk(tmp_path / "saved")
    assert [row["problem"] for row in _fields(str(tmp_path / "saved"), split="test")] == ["c"]
    with pytest.raises(UsageError, match="has the splits test, train: choose one with --split"):
        open_source(str(tmp_path / "saved"))
    with pytest.raises(UsageError, match="has no split 'dev'; its splits are test, train"):
        open_source(str(tmp_path / "saved"), ReadOptions(split="dev"))


@pytest.mark.parametrize(
    ("split", "problems"),
    [
        ("train[:2]", "ab"),
        ("train[1:]", "bc"),
        ("train[-1:]", "c"),
        ("train[:34%]", "a"),
        ("train[:1]+train[2:]", "ac"),
    ],
)
def test_slices_of_a_saved_dataset(tmp_path: Path, dataset: Any, split: str, problems: str) -> None:
    import datasets

    datasets.DatasetDict({"train": dataset, "test": dataset}).save_to_disk(tmp_path / "dict")
    alone = datasets.Dataset.from_dict(dataset.to_dict(), split="train")
    alone.save_to_disk(tmp_path / "alone")
    for folder in ("dict", "alone"):
        assert [row["problem"] for row in _fields(str(tmp_path / folder), split=split)] == list(problems)
        for wrong in ("train[nope]", "train[0:9]x", "train["):
            with pytest.raises(UsageError, match="can't be read"):
                open_source(str(tmp_path / folder), ReadOptions(split=wrong))


def test_a_streamed_dataset(tmp_path: Path, dataset: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "data"
    folder.mkdir()
    dataset.to_json(folder / "train.jsonl")
    source = open_source(str(folder), ReadOptions(streaming=True))
    assert [dict(row.fields) for row in source.rows()] == dataset.to_list()
    assert len(_fields(str(folder), streaming=True, limit=2)) == 2
    grown = source.content.change_since(open_source(str(folder), ReadOptions(streaming=True, limit=2)).content.stored())
    assert grown is None
    with pytest.raises(UsageError, match="a slice needs the whole dataset; use --limit"):
        open_source(str(folder), ReadOptions(streaming=True, split="train[:1]"))
    dataset.save_to_disk(tmp_path / "saved")
    with pytest.raises(UsageError, match="leave --streaming out"):
        open_source(str(tmp_path / "saved"), ReadOptions(streaming=True))


@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_a_folder_of_data_files(tmp_path: Path, dataset: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "data"
    folder.mkdir()
    getattr(dataset, f"to_{kind}")(folder / f"train.{kind}")
    assert [row["problem"] for row in _fields(str(folder))] == ["a", "b", "c"]
    getattr(dataset.select([0]), f"to_{kind}")(folder / f"test.{kind}")
    assert [row["problem"] for row in _fields(str(folder), split="test")] == ["a"]
    assert [row["problem"] for row in _fields(str(folder), split="train[1:]")] == ["b", "c"]
    with pytest.raises(UsageError, match="has the splits"):
        open_source(str(folder))
    with pytest.raises(UsageError, match="has no split 'dev'; its splits are"):
        open_source(str(folder), ReadOptions(split="dev"))


def test_what_is_not_there(tmp_path: Path) -> None:
    for name in ("prompts.jsonl", "./prompts", "a/b/c", str(tmp_path / "none")):
        with pytest.raises(UsageError, match="no such file or folder"):
            open_source(name)
    with pytest.raises(UsageError, match="the folder is empty"):
        open_source(str(tmp_path))
    name = _write(tmp_path, "in.jsonl", PLAIN)
    with pytest.raises(UsageError, match="--split is for datasets"):
        open_source(name, ReadOptions(split="train"))
    with pytest.raises(UsageError, match="--streaming is for datasets"):
        open_source(name, ReadOptions(streaming=True))
    with pytest.raises(UsageError, match="--subset is for datasets"):
        open_source(name, ReadOptions(subset="main"))


def _survey(tmp_path: Path, ids: list[Any], *, allow: bool = False, limit: int | None = None) -> Any:
    lines = [json.dumps({"prompt": "x"} if i is ... else {"id": i, "prompt": "x"}) for i in ids]
    source = open_source(_write(tmp_path, "in.jsonl", "\n".join(lines).encode()))
    return source, survey(source, limit=limit, allow_duplicate_ids=allow)


def test_ids_given_and_missing(tmp_path: Path) -> None:
    ids = [..., 1, "1", "", None, "x" * 300]
    source, found = _survey(tmp_path, ids)
    assert [row.id for row in source.rows()] == [0, 1, "1", "", 4, "x" * 300]
    assert (found.num_rows, found.columns) == (6, ("prompt", "id"))
    assert len({id_hash(row.id) for row in source.rows()}) == 6


@pytest.mark.parametrize("wrong", [True, 1.5, [1], {"a": 1}, "\ud800"])
def test_ids_of_a_wrong_type_are_error_rows(tmp_path: Path, wrong: Any) -> None:
    source, _ = _survey(tmp_path, [wrong, "fine"])
    broken, fine = source.rows()
    assert broken.id is None
    assert broken.error is not None
    assert broken.error.startswith("line 1: id ")
    assert (fine.id, fine.error) == ("fine", None)


def test_duplicate_ids_are_refused_by_their_lines(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        _survey(tmp_path, ["a", "b", "a", 7, 7, 7, 7, 7, "c", "b", "d", "d"])
    assert str(refused.value).endswith(
        "ids stand more than once: 'a' in lines 1, 3; 'b' in lines 2, 10; 7 in lines 4, 5, 6 and 2 more and 1 more. "
        "Make them unique or pass --allow-duplicate-ids"
    )
    _, found = _survey(tmp_path, ["a", "a"], allow=True)
    assert found.num_rows == 2
    _, found = _survey(tmp_path, ["a", "b", "a"], limit=2)
    assert found.num_rows == 2


def test_equal_hashes_of_different_ids_are_no_duplicates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagedbatch.input.reader.id_hash", lambda _: 7)
    _, found = _survey(tmp_path, ["a", "b", 1, "1"])
    assert found.num_rows == 4


def test_the_fingerprint_is_that_of_the_content(tmp_path: Path) -> None:
    one = open_source(_write(tmp_path, "one.jsonl", PLAIN)).content.chunks
    assert open_source(_write(tmp_path, "two.jsonl", PLAIN)).content.chunks == one
    assert open_source(_write(tmp_path, "one.jsonl", PLAIN.replace(b"one", b"two"))).content.chunks != one


def test_damage_inside_a_table(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    path = tmp_path / "in.parquet"
    parquet.write_table(pa.table({"prompt": [f"prompt {i}" for i in range(1000)]}), path)
    data = bytearray(path.read_bytes())
    data[4:2000] = bytes(1996)
    path.write_bytes(data)
    rows = list(open_source(str(path)).rows())
    assert len(rows) == 1000
    assert {row.error.partition(":")[2][:43] for row in rows if row.error} == {
        " row group 0 of the Parquet file is damaged"
    }
    with pytest.raises(UsageError, match="the header of the CSV file can't be read"):
        open_source(_write(tmp_path, "in.csv", b"prompt,\xff\n"))

"""Formats of text files: which one a file is in, and rows of arrays, pretty-printed objects, tables and plain text."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest
import zstandard
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedbatch.errors import UsageError
from pagedbatch.input.files import csv_rows, json_values
from pagedbatch.input.files.json_values import read_array, read_objects
from pagedbatch.input.reader import MAX_LINE_BYTES, ReadOptions, Source, open_source, survey
from pagedbatch.input.row import RawRow, Row

ROWS: list[dict[str, Any]] = [{"id": "a", "prompt": 'x]},"[{\n\\'}, {"prompt": "y", "meta": {"a": [1, {"b": []}]}}]


def opened(folder: Path, name: str, data: bytes | str, **options: Any) -> Source:
    path = folder / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return open_source(str(path), ReadOptions(**options))


def rows_of(folder: Path, name: str, data: bytes | str, **options: Any) -> list[Row]:
    return list(opened(folder, name, data, **options).rows())


def fields_of(folder: Path, name: str, data: bytes | str, **options: Any) -> list[dict[str, Any]]:
    return [dict(row.fields) for row in rows_of(folder, name, data, **options)]


def pretty(rows: list[dict[str, Any]]) -> str:
    """As jq prints them."""
    return "".join(json.dumps(row, indent=2) + "\n" for row in rows)


@pytest.mark.parametrize(
    "data",
    [
        json.dumps(ROWS),
        json.dumps(ROWS, indent=2),
        "\ufeff\n " + json.dumps(ROWS, indent="\t") + "\n\n",
        json.dumps(ROWS, separators=(",", ":")).replace("},{", "}\r\n,\r\n{"),
        pretty(ROWS),
        pretty(ROWS).replace("}\n{", "}{"),
        pretty(ROWS).replace("\n", "\r\n"),
        "".join(json.dumps(row) + "\n" for row in ROWS),
    ],
    ids=["one line", "indented", "mark and tabs", "commas apart", "jq", "jq without ends", "jq, CRLF", "lines"],
)
@pytest.mark.parametrize("compress", [bytes, gzip.compress, zstandard.compress])
def test_json_in_any_layout(tmp_path: Path, data: str, compress: Any) -> None:
    source = opened(tmp_path, "in.json", compress(data.encode()))
    assert [dict(row.fields) for row in source.rows()] == ROWS
    assert [dict(row.fields) for row in source.rows(first=1)] == ROWS[1:]


def test_an_array_of_texts_is_prompts(tmp_path: Path) -> None:
    assert fields_of(tmp_path, "in.json", '["a", "b, c"]') == [{"prompt": "a"}, {"prompt": "b, c"}]
    assert fields_of(tmp_path, "in.json", "[]") == []


def test_one_pretty_printed_object_is_a_row(tmp_path: Path) -> None:
    assert fields_of(tmp_path, "in.json", json.dumps(ROWS[1], indent=4)) == [ROWS[1]]


def test_lines_and_rows_are_named(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "in.json", '[\n {"prompt": "a"},\n {"prompt": NaN}, 7,\n {"id": 5, "prompt"},\n "d"]')
    assert [row.place for row in rows] == ["line 2", "line 3", "row 2", "line 4", "line 5"]
    assert [row.error for row in rows] == [
        None,
        "line 3: malformed JSON: NaN is not JSON",
        "row 2: a row must be a JSON object, got a number",
        "line 4: malformed JSON: Expecting ':' delimiter at column 19",
        None,
    ]
    broken = '{"prompt":\n "a"}\n{\n "id": 4,\n "prompt": x\n}\n{\n "prompt": "c"\n}\n'
    rows = rows_of(tmp_path, "in.json", broken)
    assert [row.error for row in rows] == [None, "line 3: malformed JSON: Expecting value at line 5, column 12", None]
    assert [row.line for row in rows] == [1, 3, 7]


@pytest.mark.parametrize(
    ("data", "good", "reason"),
    [
        ('[{"prompt": "a"}, {"prompt": "b', 1, "the JSON array breaks off here"),
        ('[{"prompt": "a"}, {"prompt": "b"}', 1, "the JSON array breaks off here"),
        ('[{"prompt": "a"},\n', 1, "the JSON array breaks off here"),
        ('[{"prompt": "a"}, {"prompt": ["b"}, {"prompt": "c"}]', 1, "the JSON array breaks off here"),
        ('[\n{"prompt": "a"}\n] x', 1, "something follows the end of the JSON array"),
        ('[{"prompt": "a"},, {"prompt": "b"}]', 2, "malformed JSON: Expecting value"),
        ('{\n"prompt": "a"\n}\n{\n"prompt": "b\n', 1, "malformed JSON"),
        ('{\n"prompt": "a"\n}\n}\n{\n"prompt": "b"\n}', 2, "malformed JSON"),
    ],
)
def test_what_is_cut_or_broken_leaves_the_rows_before_it(tmp_path: Path, data: str, good: int, reason: str) -> None:
    rows = rows_of(tmp_path, "in.json", data)
    assert sum(row.error is None for row in rows) == good == len(rows) - 1
    assert rows[0].error is None
    assert reason in str(next(row.error for row in rows if row.error))


def test_a_quote_that_is_missing_in_a_line_costs_one_row(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "in.json", json.dumps(ROWS, indent=1).replace('\\\\"', ""))
    assert [row.error is None for row in rows] == [False, True]


def test_a_cut_compressed_array_gives_its_rows_and_an_error(tmp_path: Path) -> None:
    data = zstandard.compress(json.dumps([{"prompt": f"{i * 7919 % 99991}"} for i in range(30_000)]).encode())
    *whole, last = rows_of(tmp_path, "in.json.zst", data[: len(data) // 2])
    assert len(whole) > 1000
    assert all(row.error is None for row in whole)
    assert "the input breaks off here: the zstd file ended" in str(last.error)


@settings(max_examples=examples(15))
@given(
    st.lists(
        st.dictionaries(st.text(max_size=3), st.recursive(st.none() | st.text(), st.lists, max_leaves=6)), max_size=4
    ),
    st.integers(1, 9),
    st.sampled_from([None, 0, 1]),
)
def test_chunks_end_anywhere(rows: list[dict[str, Any]], size: int, indent: int | None) -> None:
    array = json.dumps(rows, indent=indent, ensure_ascii=False).encode()
    objects = b"".join(json.dumps(row, indent=indent).encode() for row in rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_values, "_CHUNK_BYTES", size)
        for read, data in ((read_array, array), (read_objects, objects)):
            found = [row.fields for row in read(io.BytesIO(data), max_line_bytes=MAX_LINE_BYTES)]
            assert found == rows
            assert [row.fields for row in read(io.BytesIO(data), max_line_bytes=MAX_LINE_BYTES, first=1)] == rows[1:]


def test_an_element_that_is_too_long_is_never_held(tmp_path: Path) -> None:
    data = b'[{"prompt": "a"}, {"id": 7, "prompt": "' + b"x" * 5_000_000 + b'"}, {"prompt": "c"}]'
    splitter = json_values._Splitter(10_000, in_array=True)
    for start in range(0, len(data), 1 << 16):
        list(splitter.split(data[start : start + (1 << 16)]))
        assert len(splitter._raw) <= 10_000
    rows = rows_of(tmp_path, "in.json", data, max_line_bytes=1000)
    assert [row.error for row in rows] == [None, "row 1: longer than 1000 bytes (--max-line-bytes)", None]
    assert rows[1].id == 7


def test_broken_lines_stay_lines(tmp_path: Path) -> None:
    for first in ('{"id": 1,', '{"id": 1, "prompt": "a', '{"id": 1, "x": [', "[1,", '["a"]'):
        rows = rows_of(tmp_path, "in.jsonl", first + '\n{"prompt": "b"}\n{"prompt": "c"}\n')
        if first == "[1,":  # nobody can tell
            continue
        assert [row.line for row in rows] == [1, 2, 3], first
        assert [row.error is None for row in rows] == [False, True, True]


def test_text_is_a_prompt_a_line(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "in.txt", b"\xef\xbb\xbfOne, two.\r\n\r\n  Three \n\xff\nid: {x}\n[red]")
    assert [(row.line, row.fields.get("prompt")) for row in rows] == [
        (1, "One, two."),
        (3, "  Three "),
        (4, None),
        (5, "id: {x}"),
        (6, "[red]"),
    ]
    assert rows[2].error == "line 4: byte 1 is not UTF-8"
    assert fields_of(tmp_path, "in.txt.gz", gzip.compress(b"a\nb")) == [{"prompt": "a"}, {"prompt": "b"}]
    assert fields_of(tmp_path, "in.txt", b'{"prompt": "json"}\n') == [{"prompt": "json"}]
    assert rows_of(tmp_path, "in.TEXT", "ab\n" + "c" * 99, max_line_bytes=9)[1].error
    with pytest.raises(UsageError, match="is no text"):
        opened(tmp_path, "in.txt", b"a prompt\0\n")


@pytest.mark.parametrize(
    ("name", "mark", "options"),
    [
        ("in.tsv", "\t", {}),
        ("in", "\t", {}),
        ("in.csv", "\t", {}),
        ("in.csv", ",", {}),
        ("in.csv", ";", {"csv_delimiter": ";"}),
        ("in", "|", {"csv_delimiter": "|"}),
        ("in.tsv", ",", {"csv_delimiter": ","}),
    ],
)
def test_tables_by_any_delimiter(tmp_path: Path, name: str, mark: str, options: dict[str, Any]) -> None:
    data = f'id{mark}prompt\n1{mark}"a{mark} b"\n\n2{mark}"c\nd"\n3{mark}e\n'
    rows = rows_of(tmp_path, name, data, **options)
    assert [row.fields["prompt"] for row in rows] == [f"a{mark} b", "c\nd", "e"]
    assert [row.line for row in rows] == [2, 4, 6]


def test_the_delimiter_flag_is_named_and_belongs_to_csv(tmp_path: Path) -> None:
    source = opened(tmp_path, "in.csv", "id;prompt\n1;a\n")
    assert source.hint == " (the columns seem to be parted by ';': --csv-delimiter ';')"
    assert opened(tmp_path, "in", "id|prompt\n1|a\n").hint.endswith("--csv-delimiter '|')")
    assert opened(tmp_path, "in.csv", "id,prompt;\n1;a\n").hint == ""
    with pytest.raises(UsageError, match=r"--csv-delimiter is for CSV, and .* is JSON: leave it out"):
        opened(tmp_path, "in.jsonl", '{"prompt": "a"}', csv_delimiter=";")
    with pytest.raises(UsageError, match="the column 'b' stands twice in the header"):
        opened(tmp_path, "in.csv", "prompt,b,b\n")


def test_a_csv_row_of_many_lines_is_bounded_as_a_whole(tmp_path: Path) -> None:
    open_cell = '"' + "x\n" * 2000
    rows = rows_of(tmp_path, "in.csv", f'prompt\na\n{open_cell}"\nb\n{open_cell}', max_line_bytes=1000)
    assert [(row.line, row.fields.get("prompt")) for row in rows] == [(2, "a"), (3, None), (2004, "b"), (2005, None)]
    assert rows[1].error == "line 3: malformed CSV: a row longer than 1000 characters (--max-line-bytes)"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"a": 1}}\n[1]\n{"b"\n', r"holds no row that can be read: line 1: malformed JSON"),
        (b"Hello there.\nHow are you?\n", r"holds no row that can be read: .*name that ends in \.txt"),
        (b"%PDF-1.7\n%\xe2\xe3", "is a PDF document: extract its text first"),
        (b"PK\x03\x04\x14\0\0\0\x08\0xl/workbook.xml", "is an Excel workbook: save its rows"),
        (b"PK\x03\x04\x14\0\0\0\x08\0a.jsonl", "is a zip archive: unpack it first"),
        (b"\x80\x04\x95\x10\0\0\0", "is a Python pickle"),
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "is a PNG image"),
        (b"ARROW1\0\0", "is an Arrow file"),
        (b"\xff\xff\xff\xff\x10\0\0\0", "is an Arrow stream"),
        (b"SQLite format 3\0", "is an SQLite database"),
        (b"<!DOCTYPE HTML><html>", "is an HTML page"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "is a Git LFS pointer.*git lfs pull"),
        (bytes(257).replace(b"\0", b"a") + b"ustar", "is a tar archive"),
    ],
)
@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_what_holds_no_row_is_refused_with_the_way_out(
    tmp_path: Path, data: bytes, message: str, compress: Any
) -> None:
    with pytest.raises(UsageError, match=message):
        survey(opened(tmp_path, "in", compress(data)), limit=None, allow_duplicate_ids=False)


def test_a_text_that_begins_as_a_binary_file_does_is_text(tmp_path: Path) -> None:
    assert fields_of(tmp_path, "in.txt", "ORC or elf?\nBZh\n")[0] == {"prompt": "ORC or elf?"}


def test_rows_within_an_object_are_named(tmp_path: Path) -> None:
    source = opened(tmp_path, "in.json", json.dumps({"version": "1", "data": [{"prompt": "a"}]}, indent=1))
    assert source.hint == " (rows seem to stand under its key 'data': write them out first, jq -c '.[\"data\"][]')"


def test_rows_past_a_limit_may_be_good(tmp_path: Path) -> None:
    found = survey(opened(tmp_path, "in.jsonl", b'x\n{"prompt": "a"}\n'), limit=1, allow_duplicate_ids=False)
    assert (found.num_rows, found.is_cut) == (1, True)


@pytest.mark.parametrize(("name", "grows"), [("in.txt", True), ("in.tsv", True), ("in.json", False)])
def test_rows_may_be_added_to_lines_alone(tmp_path: Path, name: str, grows: bool) -> None:
    data = {"in.txt": "a\n", "in.tsv": "prompt\tid\na\t1\n", "in.json": '[{"prompt": "a"}]'}[name]
    before = opened(tmp_path, name, data)
    after = opened(tmp_path, name, data + "\n")
    assert (after.content.change_since(before.content.stored()) is None) is grows
    assert before.label == {"in.txt": "text", "in.tsv": "tsv", "in.json": None}[name]


def test_readers_of_files_can_be_sent_to_another_process(tmp_path: Path) -> None:
    import pickle

    read = pickle.loads(pickle.dumps(opened(tmp_path, "in.tsv", "prompt\tid\na\t1\n").read))
    assert list(read(0)) == [RawRow({"prompt": "a", "id": "1"}, line=2)]


@settings(max_examples=examples(20))
@given(
    st.lists(st.tuples(st.text('a",\n\r é'), st.text('a",\n\r é')), max_size=5),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.integers(1, 5),
)
def test_quoted_cells_hold_anything(cells: list[tuple[str, str]], end: str, size: int) -> None:
    written = io.StringIO(newline="")
    csv.writer(written, lineterminator=end, quoting=csv.QUOTE_ALL).writerows([("prompt", "b"), *cells])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csv_rows, "_CHUNK_CHARACTERS", size)
        stream = io.BytesIO(written.getvalue().encode())
        found = [row.fields for row in csv_rows.read_csv(stream, delimiter=",", max_line_bytes=1000)]
    assert found == [{"prompt": prompt, "b": other or None} for prompt, other in cells]


def test_a_cell_of_many_lines_is_read_in_few_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = []
    real = csv_rows._Records.__next__

    def counted(lines: csv_rows._Records) -> str:
        pieces.append(real(lines))
        return pieces[-1]

    monkeypatch.setattr(csv_rows._Records, "__next__", counted)
    (row,) = rows_of(tmp_path, "in.csv", 'prompt\n"' + "x\n" * 200_000 + '"\n')
    assert len(row.fields["prompt"]) == 400_000
    assert len(pieces) < 50

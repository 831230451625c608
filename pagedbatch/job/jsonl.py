"""Reads JSON Lines and CSV from a stream of bytes. Knows nothing about paths, compression or ids' meaning.

A record of JSON Lines ends at LF and nowhere else. Whatever is wrong with one line stays with that line.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import Any, BinaryIO, NoReturn

from pagedbatch.errors import UsageError
from pagedbatch.job.field_table import JSON_CELLS
from pagedbatch.job.messages import short
from pagedbatch.job.rows import RawRow, RowId, is_unicode

_WHITE_SPACE = b" \t\r\n"  # JSON's; what else looks blank, such as a vertical tab, is part of a record
_SKIP_BYTES = 1 << 16
_MOST_NESTED = 100

#: What a cut or damaged compressed file raises while it is read.
STREAM_ERRORS = (EOFError, OSError, zlib.error)

_READABLE_BYTES = 4096
_READABLE_ID = re.compile(rb'\{\s*"(?:custom_)?id"\s*:\s*("(?:[^"\\]|\\.)*"|-?\d{1,18})\s*[,}]')

#: Python's own words, which pandas writes.
_PYTHON_WORDS = {"True": True, "False": False}


def read_jsonl(stream: BinaryIO, *, max_line_bytes: int, first: int = 0) -> Iterator[RawRow]:
    """The rows of a JSON Lines stream. Blank lines are none; a broken line is an error row and the reading goes on.

    Rows before `first` are counted and not parsed.
    """
    number = index = 0
    while True:
        try:
            raw = stream.readline(max_line_bytes + 1)
            if not raw:
                return
            whole = len(raw) <= max_line_bytes or raw.endswith(b"\n")
            if not whole:
                raw = raw[:_READABLE_BYTES]
                _skip_line(stream)
        except STREAM_ERRORS as error:
            if index >= first:
                yield RawRow(line=number + 1, error=f"the input breaks off here: {error}")
            return
        number += 1
        if number == 1:
            raw = raw.removeprefix(codecs.BOM_UTF8)
        if whole and not raw.strip(_WHITE_SPACE):
            continue
        index += 1
        if index <= first:
            continue
        if whole:
            yield _parse_line(raw, number)
        else:
            yield _broken(raw, number, f"longer than {max_line_bytes} bytes (--max-line-bytes)")


def _skip_line(stream: BinaryIO) -> None:
    while (chunk := stream.readline(_SKIP_BYTES)) and not chunk.endswith(b"\n"):
        pass


def _parse_line(raw: bytes, number: int) -> RawRow:
    try:
        fields = _DECODER.decode(raw.strip(_WHITE_SPACE).decode("utf-8"))
    except UnicodeDecodeError as error:
        return _broken(raw, number, f"byte {error.start + 1} is not UTF-8")
    except json.JSONDecodeError as error:
        return _broken(raw, number, f"malformed JSON: {error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:
        return _broken(raw, number, f"malformed JSON: {error}")
    if raw.count(b"[") + raw.count(b"{") > _MOST_NESTED and not _is_flat(fields):
        return _broken(raw, number, f"nested more than {_MOST_NESTED} deep")
    if not isinstance(fields, dict):
        return RawRow(line=number, error=f"a row must be a JSON object, got {_kind(fields)}")
    return RawRow(fields, line=number)


def _is_flat(value: Any) -> bool:
    """Whether no value lies more than `_MOST_NESTED` deep, so that whatever walks it has room."""
    level = [value]
    for _ in range(_MOST_NESTED + 1):
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, (dict, list))]
        level = [item for items in inner for item in items]
    return not level


def _broken(raw: bytes, number: int, reason: str) -> RawRow:
    return RawRow(line=number, error=reason, readable_id=_readable_id(raw))


def _readable_id(raw: bytes) -> RowId | None:
    match = _READABLE_ID.match(raw[:_READABLE_BYTES].lstrip(_WHITE_SPACE))
    if match is None:
        return None
    with suppress(ValueError):
        found = json.loads(match[1].decode("utf-8"))
        if isinstance(found, int):
            return found
        found.encode()
        return str(found)
    return None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large for a number")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; one whose keys stand twice means different things to different readers."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {short(twice)} stands twice")
    return fields


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_finite, parse_constant=_refuse_constant)


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a string", int: "a number", float: "a number", bool: "a boolean"}
    return names.get(type(value), "null")


def csv_columns(stream: BinaryIO) -> list[str]:
    """The header of a CSV stream.

    Raises:
        UsageError: it can't be read.
    """
    with _text(stream) as text:
        try:
            columns = next(csv.reader(text), [])
        except (csv.Error, *STREAM_ERRORS) as error:
            raise UsageError(f"the header of the CSV file can't be read: {error}") from None
    if not is_unicode("".join(columns)):
        raise UsageError("the header of the CSV file can't be read: it is not UTF-8")
    return columns


def read_csv(stream: BinaryIO, *, max_line_bytes: int, ignored: Collection[str] = ()) -> Iterator[RawRow]:
    """The rows of a CSV stream with a header line. An empty cell is a value that was not given.

    Cells are text, but those of options that are not, which are read as JSON unless the column is `ignored`.
    """
    csv.field_size_limit(max_line_bytes)
    typed = JSON_CELLS.difference(ignored)
    with _text(stream) as text:
        lines = _Lines(text, max_line_bytes)
        cells = csv.DictReader(lines, restkey="", strict=True)
        if cells.fieldnames is None:
            return
        while True:
            first = lines.count + 1
            try:
                row = next(cells, None)
            except csv.Error as error:
                yield RawRow(line=first, error=f"malformed CSV: {error}")
                continue
            except STREAM_ERRORS as error:
                yield RawRow(line=first, error=f"the input breaks off here: {error}")
                return
            if row is None:
                return
            if "" in row and isinstance(row[""], list):
                yield RawRow(line=first, error="more cells than the header has columns")
            elif not all(map(is_unicode, filter(None, row.values()))):
                yield RawRow(line=first, error="not UTF-8")
            else:
                yield RawRow({name: _cell(name, cell, typed) for name, cell in row.items()}, line=first)


def _text(stream: BinaryIO) -> io.TextIOWrapper:
    """Bytes that are not UTF-8 become what no text holds, so that only their own row is lost."""
    return io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")


class _Lines:
    """The lines of a text with their ends, none longer in memory than `most` characters; `count` is how many so far."""

    def __init__(self, text: io.TextIOWrapper, most: int) -> None:
        self.count = 0
        self._text = text
        self._most = most

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = self._text.readline(self._most + 1)
        if not line:
            raise StopIteration
        self.count += 1
        if len(line) <= self._most or line.endswith("\n"):
            return line
        while (rest := self._text.readline(_SKIP_BYTES)) and not rest.endswith("\n"):
            pass
        raise csv.Error(f"a line longer than {self._most} characters (--max-line-bytes)")


def _cell(name: str, cell: str | None, typed: Collection[str]) -> Any:
    if not cell:
        return "" if name == "prompt" and cell == "" else None
    if name in typed:
        if cell in _PYTHON_WORDS:
            return _PYTHON_WORDS[cell]
        with suppress(ValueError, RecursionError):
            return _DECODER.decode(cell)
    return cell

"""Reads JSON Lines from a stream of bytes.

A record of JSON Lines ends at LF and nowhere else. Whatever is wrong with one line stays with that line.
"""

from __future__ import annotations

import codecs
import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, BinaryIO, NoReturn

from pagedbatch.input.row import RawRow
from pagedbatch.row_context import RowId
from pagedbatch.wording import short

WHITE_SPACE = b" \t\r\n"  # JSON's; what else looks blank, such as a vertical tab, is part of a record
_SKIP_BYTES = 1 << 16
_MAX_NESTED = 100

#: What a cut or damaged compressed file raises while it is read.
STREAM_ERRORS = (EOFError, OSError, zlib.error)

READABLE_BYTES = 4096
_READABLE_ID = re.compile(rb'\{\s*"(?:custom_)?id"\s*:\s*("(?:[^"\\]|\\.)*"|-?\d{1,18})\s*[,}]')


def read_jsonl(stream: BinaryIO, *, max_line_bytes: int, first: int = 0) -> Iterator[RawRow]:
    """The rows of a JSON Lines stream. Blank lines are none; a broken line is an error row and the reading goes on.

    Rows before `first` are counted and not parsed.
    """
    return read_lines(stream, parse_row, max_line_bytes=max_line_bytes, first=first)


def read_lines(
    stream: BinaryIO, parse: Callable[[bytes, int], RawRow], *, max_line_bytes: int, first: int
) -> Iterator[RawRow]:
    """What `parse` makes of each line that is not blank, from its bytes and its number."""
    number = index = 0
    while True:
        try:
            raw = stream.readline(max_line_bytes + 1)
            if not raw:
                return
            whole = len(raw) <= max_line_bytes or raw.endswith(b"\n")
            if not whole:
                raw = raw[:READABLE_BYTES]
                _skip_line(stream)
        except STREAM_ERRORS as error:
            if index >= first:
                yield RawRow(line=number + 1, error=f"the input breaks off here: {error}")
            return
        number += 1
        if number == 1:
            raw = raw.removeprefix(codecs.BOM_UTF8)
        if whole and not raw.strip(WHITE_SPACE):
            continue
        index += 1
        if index <= first:
            continue
        if whole:
            yield parse(raw, number)
        else:
            yield too_long(raw, number, max_line_bytes)


def _skip_line(stream: BinaryIO) -> None:
    while (chunk := stream.readline(_SKIP_BYTES)) and not chunk.endswith(b"\n"):
        pass


def parse_row(raw: bytes, number: int | None) -> RawRow:
    """The row that is the JSON object in `raw`, which begins in line `number`."""
    value, reason = parse_value(raw, number)
    if reason is not None:
        return broken_row(raw, number, reason)
    return RawRow(value, line=number) if isinstance(value, dict) else not_a_row(value, number)


def parse_value(raw: bytes, number: int | None) -> tuple[Any, str | None]:
    """The JSON value in `raw`, or why it is none."""
    text = raw.strip(WHITE_SPACE)
    try:
        value = DECODER.decode(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        return None, f"byte {error.start + 1} is not UTF-8"
    except json.JSONDecodeError as error:
        line = "" if error.lineno == 1 or number is None else f"line {number + error.lineno - 1}, "
        return None, f"malformed JSON: {error.msg} at {line}column {error.colno}"
    except (ValueError, RecursionError) as error:
        return None, f"malformed JSON: {error}"
    if raw.count(b"[") + raw.count(b"{") > _MAX_NESTED and not _is_flat(value):
        return None, f"nested more than {_MAX_NESTED} deep"
    return value, None


def too_long(raw: bytes, number: int | None, most: int) -> RawRow:
    """The error row for a row of more than `most` bytes, of which `raw` is the beginning."""
    return broken_row(raw, number, f"longer than {most} bytes (--max-line-bytes)")


def broken_row(raw: bytes, number: int | None, reason: str) -> RawRow:
    """The error row for `raw`, with its id where that can be read."""
    return RawRow(line=number, error=reason, readable_id=_readable_id(raw))


def not_a_row(value: Any, number: int | None) -> RawRow:
    """The error row for a JSON value that is no object."""
    return RawRow(line=number, error=f"a row must be a JSON object, got {_kind(value)}")


def _is_flat(value: Any) -> bool:
    """Whether no value lies more than `_MAX_NESTED` deep, so that whatever walks it has room."""
    level = [value]
    for _ in range(_MAX_NESTED + 1):
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, (dict, list))]
        level = [item for items in inner for item in items]
    return not level


def _readable_id(raw: bytes) -> RowId | None:
    match = _READABLE_ID.match(raw[:READABLE_BYTES].lstrip(WHITE_SPACE))
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


DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_finite, parse_constant=_refuse_constant)


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a string", int: "a number", float: "a number", bool: "a boolean"}
    return names.get(type(value), "null")

"""Reads JSON values that span lines: the elements of one array, or objects that follow each other, as jq prints them.

A value ends where its brackets do, and is parsed by itself, so that what is wrong with one stays with it; none is held
that is longer than a row may be.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import BinaryIO

from pagedbatch.input.files.jsonl import (
    READABLE_BYTES,
    STREAM_ERRORS,
    WHITE_SPACE,
    broken_row,
    not_a_row,
    parse_value,
    too_long,
)
from pagedbatch.input.row import RawRow

_CHUNK_BYTES = 1 << 16
#: A line feed within a string is a quote that was left out: the string ends there, so that the next one is not lost.
_IN_STRING = re.compile(rb'["\\\n]')
#: A string that is whole and plain is one token.
_OUTSIDE = re.compile(rb'"(?:[^"\\\n]*+")?|[{}\[\]]')
_BETWEEN_ELEMENTS = re.compile(rb'"(?:[^"\\\n]*+")?|[{}\[\],]')
_OPENING, _CLOSING = (b"{", b"["), (b"}", b"]")
_TOKENS = re.compile(rb'"(?:[^"\\\n]++|\\.)*+"?|[{}\[\]]')


def read_array(stream: BinaryIO, *, max_line_bytes: int, first: int = 0) -> Iterator[RawRow]:
    """The rows of a JSON array: objects, or texts, which are prompts. Those before `first` are not parsed.

    An array that is cut gives the rows before the cut and an error row.
    """
    return islice(_rows(stream, _Splitter(max_line_bytes, in_array=True), first), first, None)


def read_objects(stream: BinaryIO, *, max_line_bytes: int, first: int = 0) -> Iterator[RawRow]:
    """The rows of a stream of JSON objects, each over any number of lines. Those before `first` are not parsed."""
    return islice(_rows(stream, _Splitter(max_line_bytes, in_array=False), first), first, None)


def end_of_value(text: bytes) -> int | None:
    """Where the JSON array or object that `text` begins with ends; None if it doesn't."""
    depth = 0
    for token in _TOKENS.finditer(text):
        depth += (token[0] in _OPENING) - (token[0] in _CLOSING)
        if depth == 0:
            return token.end()
    return None


@dataclass(frozen=True, slots=True)
class _Piece:
    """The bytes of a value, or the first of them where it `is_too_long`. `line`: None if another begins in the same."""

    raw: bytes
    line: int | None
    is_too_long: bool


class _Splitter:
    """Cuts bytes, which come in chunks, into values. `is_closed`: the array has ended."""

    def __init__(self, max_chars: int, *, in_array: bool) -> None:
        self.max_chars = max_chars
        self.in_array = in_array
        self.is_closed = False
        self._is_open = False
        self._depth = 0
        self._in_string = self._escaped = False
        self._raw = bytearray()
        self._is_too_long = False
        self._line = self._begin = 1  # where the splitter is, and where the value began
        self._used_line = 0

    def split(self, chunk: bytes) -> Iterator[_Piece]:
        """The values that end in `chunk`."""
        if not self._is_open:
            chunk = self._open(chunk)
        begin, place = 0, int(self._escaped)
        self._escaped = False
        while not self.is_closed and (token := self._pattern.search(chunk, place)):
            place, found = token.end(), token[0]
            if self._in_string:
                self._in_string = found == b"\\"
                if self._in_string:
                    self._escaped = place == len(chunk)
                    place += 1
            elif found.startswith(b'"'):
                self._in_string = len(found) == 1
            elif found in _OPENING:
                self._depth += 1
            elif self._depth == 0 and found == b"}" and self.in_array:
                continue  # one too many: it stays with its element
            elif self._depth > 1 or (self._depth == 1 and self.in_array):
                self._depth -= 1
            else:
                self._depth = 0
                self._keep(chunk[begin : place - self.in_array])
                begin = place
                self.is_closed = found == b"]" and self.in_array
                if self._raw or not self.is_closed:
                    yield self.take()
        self._keep(chunk[begin:])

    def take(self) -> _Piece:
        """What has come since the last value."""
        line = self._begin if self._raw else self._line
        piece = _Piece(bytes(self._raw), None if line == self._used_line else line, self._is_too_long)
        self._used_line = line
        self._raw.clear()
        self._is_too_long = False
        return piece

    @property
    def has_rest(self) -> bool:
        return bool(self._raw)

    def _open(self, chunk: bytes) -> bytes:
        """The first chunk without what stands before the first value: a byte order mark, an array's bracket."""
        self._is_open = True
        chunk = chunk.removeprefix(codecs.BOM_UTF8)
        if not self.in_array:
            return chunk
        body = chunk.lstrip(WHITE_SPACE)
        self._line += chunk.count(b"\n", 0, len(chunk) - len(body))
        return body.removeprefix(b"[")

    @property
    def _pattern(self) -> re.Pattern[bytes]:
        if self._in_string:
            return _IN_STRING
        return _BETWEEN_ELEMENTS if self.in_array and self._depth == 0 else _OUTSIDE

    def _keep(self, part: bytes) -> None:
        if not self._raw:
            body = part.lstrip(WHITE_SPACE)
            self._begin = self._line + part.count(b"\n", 0, len(part) - len(body))
        else:
            body = part
        self._line += part.count(b"\n")
        if not self._is_too_long:
            self._raw += body
            self._is_too_long = len(self._raw) > self.max_chars
            if self._is_too_long:
                del self._raw[READABLE_BYTES:]


def _rows(stream: BinaryIO, values: _Splitter, first: int) -> Iterator[RawRow]:
    """All rows; those before `first` are empty."""
    index = 0
    while True:
        try:
            chunk = stream.read(_CHUNK_BYTES)
        except STREAM_ERRORS as error:
            yield RawRow(line=values.take().line, error=f"the input breaks off here: {error}")
            return
        if not chunk:
            break
        for piece in values.split(chunk):
            index += 1
            yield RawRow() if index <= first else _row(piece, values)
    if values.in_array and not values.is_closed:
        piece = values.take()
        yield broken_row(piece.raw, piece.line, "the JSON array breaks off here: it has no end")
    elif values.has_rest and values.in_array:
        yield RawRow(line=values.take().line, error="something follows the end of the JSON array")
    elif values.has_rest:
        yield _row(values.take(), values)


def _row(piece: _Piece, values: _Splitter) -> RawRow:
    if piece.is_too_long:
        return too_long(piece.raw, piece.line, values.max_chars)
    value, reason = parse_value(piece.raw, piece.line)
    if reason is not None:
        return broken_row(piece.raw, piece.line, reason)
    if isinstance(value, str):
        value = {"prompt": value}
    return RawRow(value, line=piece.line) if isinstance(value, dict) else not_a_row(value, piece.line)

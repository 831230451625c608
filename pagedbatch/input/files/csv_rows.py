"""Reads CSV from a stream of bytes, with any of four delimiters."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import suppress
from itertools import islice, zip_longest
from typing import Any, BinaryIO

from pagedbatch.errors import UsageError
from pagedbatch.input.fields.field_table import JSON_CELLS
from pagedbatch.input.files.jsonl import DECODER, STREAM_ERRORS
from pagedbatch.input.row import RawRow
from pagedbatch.readers import is_unicode
from pagedbatch.wording import short

#: What may stand between the columns, by the names that --csv-delimiter takes beside the characters themselves.
_CHUNK_CHARACTERS = 1 << 16
_MAX_HEADER = 1 << 20
#: Python's own words, which pandas writes.
_PYTHON_WORDS = {"True": True, "False": False}


def csv_columns(name: str, stream: BinaryIO, delimiter: str) -> tuple[str, ...]:
    """The header of a CSV stream.

    Raises:
        UsageError: it can't be read, or a column stands twice in it.
    """
    csv.field_size_limit(_MAX_HEADER)
    with _text(stream) as text:
        try:
            columns = next(csv.reader(_Records(text, _MAX_HEADER), delimiter=delimiter, strict=True), [])
        except (csv.Error, *STREAM_ERRORS) as error:
            raise UsageError(f"{name}: the header of the CSV file can't be read: {error}") from None
    if not is_unicode("".join(columns)):
        raise UsageError(f"{name}: the header of the CSV file can't be read: it is not UTF-8")
    twice = [column for column, count in Counter(columns).items() if count > 1 and column]
    if twice:
        raise UsageError(f"{name}: the column {short(twice[0])} stands twice in the header: rename one")
    return tuple(columns)


def read_csv(
    stream: BinaryIO, *, delimiter: str, max_line_bytes: int, first: int = 0, ignored: Collection[str] = ()
) -> Iterator[RawRow]:
    """The rows of a CSV stream with a header line, from row `first` on. An empty cell is a value that was not given.

    Where a row begins only their reader can tell, so that those before `first` are read and dropped. Cells are text,
    but those of options that are not, which are read as JSON unless the column is `ignored`.
    """
    typed = JSON_CELLS.difference(ignored)
    return islice(_rows(stream, delimiter, max_line_bytes, typed), first, None)


def _rows(stream: BinaryIO, delimiter: str, max_chars: int, typed: Collection[str]) -> Iterator[RawRow]:
    csv.field_size_limit(max(max_chars, _MAX_HEADER))
    with _text(stream) as text:
        lines = _Records(text, max(max_chars, _MAX_HEADER))
        records = csv.reader(lines, delimiter=delimiter, strict=True)
        columns = next(records, [])
        lines.max_chars = max_chars
        while True:
            lines.begin()
            try:
                cells = next(records, None)
            except csv.Error as error:
                yield RawRow(line=lines.first, error=f"malformed CSV: {error}")
                continue
            except STREAM_ERRORS as error:
                yield RawRow(line=lines.first, error=f"the input breaks off here: {error}")
                return
            if cells is None:
                return
            if cells:  # else the line is blank
                yield _row(columns, cells, lines.first, typed)


def _row(columns: list[str], cells: list[str], line: int, typed: Collection[str]) -> RawRow:
    if len(cells) > len(columns):
        return RawRow(line=line, error="more cells than the header has columns")
    if not all(map(is_unicode, cells)):
        return RawRow(line=line, error="not UTF-8")
    return RawRow({name: _cell(name, cell, typed) for name, cell in zip_longest(columns, cells)}, line=line)


def _text(stream: BinaryIO) -> io.TextIOWrapper:
    """Bytes that are not UTF-8 become what no text holds, so that only their own row is lost."""
    return io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")


class _Records:
    """The lines of a text with their ends, for a reader that makes records of them.

    The reader asks for more of a record only within a quoted cell: up to the next quote it then gets many lines in one.
    A record of more than `max_chars` characters is an error, and the rest of it is skipped without being held. The
    number of quotes so far tells whether a cell is still open at the end of a line. `first` is the line in which the
    record began.
    """

    def __init__(self, text: io.TextIOWrapper, max_chars: int) -> None:
        self.max_chars = max_chars
        self.first = 1
        self._text = text
        self._ahead = io.StringIO()
        self._line = 0
        self._size = self._quotes = 0

    def begin(self) -> None:
        """What is read from now on is another record."""
        self.first = self._line + 1
        self._size = self._quotes = 0

    def __iter__(self) -> _Records:
        return self

    def __next__(self) -> str:
        part = self._part(max(1, self.max_chars - self._size + 1), in_cell=self._size > 0)
        if not part:
            raise StopIteration
        if self._size - part.endswith("\n") <= self.max_chars:
            return part
        while part and not (part.endswith(("\n", "\r")) and self._quotes % 2 == 0):
            part = self._part(_CHUNK_CHARACTERS, in_cell=self._quotes % 2 == 1)
        raise csv.Error(f"a row longer than {self.max_chars} characters (--max-line-bytes)")

    def _part(self, max_chars: int, *, in_cell: bool) -> str:
        """The rest of the line, or of a quoted cell all that is there before the next quote; nothing at the end."""
        part = self._ahead.readline(max_chars)
        if not part and in_cell:
            part = self._read_cell(min(max_chars, _CHUNK_CHARACTERS))
            if part:
                return self._counted(part)
            part = self._ahead.readline(max_chars)
        if len(part) < max_chars and not part.endswith(("\n", "\r")):
            part += self._text.readline(max_chars - len(part))
        return self._counted(part)

    def _counted(self, part: str) -> str:
        self._size += len(part)
        self._quotes += part.count('"')
        self._line += part.count("\n") or part.count("\r")
        return part

    def _read_cell(self, max_chars: int) -> str:
        """What there is before the next quote, up to so much; what was read behind it is kept for later."""
        chunk = self._text.read(max_chars)
        if chunk.endswith("\r"):
            chunk += self._text.read(1)  # the two halves of a line end stay together
        inside, quote, rest = chunk.partition('"')
        self._ahead = io.StringIO(quote + rest, newline="")
        return inside


def _cell(name: str, cell: str | None, typed: Collection[str]) -> Any:
    if not cell:
        return "" if name == "prompt" and cell == "" else None
    if name in typed:
        if cell in _PYTHON_WORDS:
            return _PYTHON_WORDS[cell]
        with suppress(ValueError, RecursionError):
            return DECODER.decode(cell)
    return cell

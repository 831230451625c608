"""Opens a regular file of rows, whatever its format."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pagedbatch.errors import UsageError
from pagedbatch.fingerprint import Content, file_content
from pagedbatch.input.files.arrow_rows import parquet_columns, read_parquet
from pagedbatch.input.files.compression import is_compressed, open_stream
from pagedbatch.input.files.csv_rows import csv_columns
from pagedbatch.input.files.foreign import is_binary, refuse_foreign
from pagedbatch.input.files.formats import TextFormat, detect_format
from pagedbatch.input.files.jsonl import STREAM_ERRORS, WHITE_SPACE
from pagedbatch.input.row import RawRow

_HEAD_BYTES = 1 << 16
_PARQUET_MAGIC = b"PAR1"
#: Byte order marks of UTF-16; UTF-32's begin with them or with a zero byte.
_WIDE_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


@dataclass(frozen=True, slots=True)
class RowFile:
    """A file whose format is known; see `Source`. `rows` begins a pass from a given row on."""

    content: Content
    columns: tuple[str, ...] | None
    rows: Callable[[int], Iterator[RawRow]]
    label: str | None = None
    hint: str = ""


def open_row_file(
    name: str, path: Path, *, max_line_bytes: int, csv_delimiter: str | None, ignored: Collection[str] = ()
) -> RowFile:
    """Opens the file at `path`, which the user calls `name`. Columns in `ignored` are data, whatever their names mean.

    Raises:
        UsageError: it is plainly something else than rows, or its header can't be read.
        OSError: it can't be read.
    """
    with path.open("rb") as file:
        magic = file.read(4)
    if magic == _PARQUET_MAGIC:
        if csv_delimiter is not None:
            raise UsageError(f"--csv-delimiter is for CSV, and {name} is Parquet: leave it out")
        content = file_content(name, path, may_grow=False)
        return RowFile(content, parquet_columns(name, path), partial(read_parquet, name, path))
    head, is_whole = _head(name, path)
    found = detect_format(name, head, is_whole=is_whole, delimiter=csv_delimiter)
    if found.kind == "text" and is_binary(head):
        raise UsageError(f"{name} is no text: it holds bytes that no text has")
    content = file_content(name, path, may_grow=found.may_grow and not is_compressed(magic))
    columns = csv_columns(name, open_stream(path), found.delimiter) if found.kind == "csv" else None
    return RowFile(content, columns, partial(_read, path, found, max_line_bytes, ignored), found.label, found.hint)


def _read(path: Path, found: TextFormat, max_line_bytes: int, ignored: Collection[str], first: int) -> Iterator[RawRow]:
    with open_stream(path) as stream:
        yield from found.rows(stream, max_line_bytes, first, ignored)


def _head(name: str, path: Path) -> tuple[bytes, bool]:
    """The first bytes of a text file, decompressed, from its first letter on, and whether there are no more.

    Refuses what is plainly something else.
    """
    with open_stream(path) as stream:
        try:
            head = stream.read(_HEAD_BYTES)
        except STREAM_ERRORS:
            return b"", False
    refuse_foreign(name, head)
    if head.startswith(_WIDE_MARKS) or b"\x00" in head[:4]:
        raise UsageError(f"{name}, line 1: this is UTF-16 or UTF-32: convert it first (iconv -f UTF-16 -t UTF-8)")
    return head.removeprefix(codecs.BOM_UTF8).lstrip(WHITE_SPACE), len(head) < _HEAD_BYTES

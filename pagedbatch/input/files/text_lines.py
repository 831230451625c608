"""Reads a text file with one prompt per line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

from pagedbatch.input.files.jsonl import read_lines
from pagedbatch.input.row import RawRow


def read_text(stream: BinaryIO, *, max_line_bytes: int, first: int = 0) -> Iterator[RawRow]:
    """A row for each line that is not blank, its prompt the line without its end; those before `first` are dropped."""
    return read_lines(stream, _row, max_line_bytes=max_line_bytes, first=first)


def _row(raw: bytes, number: int) -> RawRow:
    try:
        prompt = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return RawRow(line=number, error=f"byte {error.start + 1} is not UTF-8")
    return RawRow({"prompt": prompt.removesuffix("\n").removesuffix("\r")}, line=number)

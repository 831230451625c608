"""Detects the format of a text file of rows from its first bytes and, where these leave it open, from its name."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO, Literal

from pagedbatch.errors import UsageError
from pagedbatch.input.files.csv_rows import read_csv
from pagedbatch.input.files.json_values import end_of_value, read_array, read_objects
from pagedbatch.input.files.jsonl import WHITE_SPACE, parse_value, read_jsonl
from pagedbatch.input.files.text_lines import read_text
from pagedbatch.input.row import RawRow
from pagedbatch.readers import DELIMITERS

Kind = Literal["jsonl", "csv", "text", "array", "objects"]

_TEXT_NAMES = (".txt", ".text")
_TAB_NAMES = (".tsv", ".tab")
#: In a text of prompts a line may begin with a bracket; with these it is JSON.
_JSON_BEGINS = re.compile(rb'\{\s*["}]|\[\s*[\[{"\]]')
#: A line of a pretty-printed object that goes on in the next one.
_GOES_ON = (b"{", b"[", b",", b":")
_HOLDS_ROWS = re.compile(rb'\{\s*(?:"[^"\\]*"\s*:\s*(?:"[^"\\]*"|[\w.+-]+)\s*,\s*)*"([^"\\]+)"\s*:\s*\[\s*\{')
_NOT_ROWS = (b"messages", b"tools")
_READERS = {"jsonl": read_jsonl, "text": read_text, "array": read_array, "objects": read_objects}
_CHOSEN_BY_NAME = (
    "CSV is told by a name that ends in .csv or .tsv, a column named prompt or --csv-delimiter, a text with a prompt a "
    "line by a name that ends in .txt"
)


@dataclass(frozen=True, slots=True)
class TextFormat:
    """How a text file is read. `hint`: what may help where its rows can't be read or lack a column.

    `label` is set where the name or a flag decided, so that a run can tell that another one read the same file
    otherwise.
    """

    kind: Kind
    delimiter: str = ","
    label: str | None = None
    hint: str = ""

    @property
    def may_grow(self) -> bool:
        """Whether rows that are appended leave those before them as they were."""
        return self.kind in ("jsonl", "csv", "text")

    def rows(
        self, stream: BinaryIO, max_line_bytes: int, first: int, ignored: Collection[str] = ()
    ) -> Iterator[RawRow]:
        """The rows of a stream from row `first` on. Columns in `ignored` are data, whatever their names mean."""
        read: Callable[..., Iterator[RawRow]] = _READERS.get(
            self.kind, partial(read_csv, delimiter=self.delimiter, ignored=ignored)
        )
        return read(stream, max_line_bytes=max_line_bytes, first=first)


def detect_format(name: str, head: bytes, *, is_whole: bool, delimiter: str | None) -> TextFormat:
    """The format of a file that begins with `head`, without a byte order mark and blank lines before it.

    Args:
        is_whole: there is no more than the head.
        delimiter: what stands between the columns, if the user said so; then it is CSV.

    Raises:
        UsageError: the user said that it is CSV, and it is JSON.
    """
    plain_name = name.lower().removesuffix(".gz").removesuffix(".zst")
    if plain_name.endswith(_TEXT_NAMES) and not _JSON_BEGINS.match(head):
        is_json = False
    else:
        is_json = head.startswith((b"{", b"["))
    if delimiter is not None:
        if is_json and _JSON_BEGINS.match(head):
            raise UsageError(f"--csv-delimiter is for CSV, and {name} is JSON: leave it out")
        return TextFormat("csv", delimiter, label=f"csv, {delimiter!r}", hint=_csv_hint(head, delimiter))
    if is_json:
        kind: Kind = _array_or_lines(head, is_whole) if head.startswith(b"[") else _objects_or_lines(head, is_whole)
        return TextFormat(kind, hint=_json_hint(head))
    header = head.partition(b"\n")[0].strip()
    has_prompt = any(
        cell.strip(b'"') == b"prompt" for mark in DELIMITERS.values() for cell in header.split(mark.encode())
    )
    is_tabbed = plain_name.endswith(_TAB_NAMES)
    if is_tabbed or plain_name.endswith(".csv") or has_prompt:
        delimiter = "\t" if is_tabbed or (b"\t" in header and b"," not in header) else ","
        return TextFormat("csv", delimiter, label="tsv" if is_tabbed else None, hint=_csv_hint(head, delimiter))
    if plain_name.endswith(_TEXT_NAMES):
        return TextFormat("text", label="text")
    return TextFormat("jsonl", hint=f" ({_CHOSEN_BY_NAME})")


def _array_or_lines(head: bytes, is_whole: bool) -> Kind:
    """One array, or JSON lines whose first is one, which is then no row."""
    end = end_of_value(head)
    is_alone = end is None or (is_whole and not head[end:].strip(WHITE_SPACE))
    return "array" if is_alone or b"\n" in head[:end] else "jsonl"


def _objects_or_lines(head: bytes, is_whole: bool) -> Kind:
    """Objects over several lines, or JSON lines, of which the first may be broken."""
    end = end_of_value(head)
    value = head[:end]
    first, line_end, rest = value.partition(b"\n")
    if not line_end or (end is None and is_whole):
        return "jsonl"
    if end is not None and parse_value(value, None)[1] is None:
        return "objects"
    goes_on = first.rstrip().endswith(_GOES_ON) and not rest.lstrip(WHITE_SPACE).startswith(b"{")
    return "objects" if goes_on else "jsonl"


def _json_hint(head: bytes) -> str:
    found = _HOLDS_ROWS.match(head)
    if found is None or found[1] in _NOT_ROWS:
        return ""
    key = found[1].decode(errors="replace")
    return f" (rows seem to stand under its key {key!r}: write them out first, jq -c '.[\"{key}\"][]')"


def _csv_hint(head: bytes, delimiter: str) -> str:
    header = head.partition(b"\n")[0]
    if delimiter.encode() in header:
        return ""
    other = next((mark for mark in DELIMITERS.values() if mark.encode() in header), None)
    if other is None:
        return ""
    typed = "tab" if other == "\t" else f"'{other}'"
    return f" (the columns seem to be parted by {other!r}: --csv-delimiter {typed})"

"""One row of the input, whatever the file was: its place, its id, and what it asks for by our own names."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any

from pagedbatch.input.fields.row_fields import read_fields
from pagedbatch.input.openai_batch import check_model, plain_fields, reply_format
from pagedbatch.readers import is_unicode
from pagedbatch.row_context import ReplyFormat, RowId
from pagedbatch.wording import short


@dataclass(frozen=True, slots=True)
class RawRow:
    """A row as a format reader found it: its fields, or the reason why there are none.

    `line` is the line of a text file where the row begins, counted from 1; tables have none. `error` does not say where
    the row is. `readable_id` is what could be made out of the id of a row that is otherwise broken.
    """

    fields: Mapping[str, Any] = field(default_factory=dict)
    line: int | None = None
    error: str | None = None
    readable_id: RowId | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """A row in its place: `index` counts the rows of the input from 0 and is the key of everything internal.

    `id` is what the user calls the row: given, else the row number; None where a broken row's id can't be read.
    `error` is the whole message, place included. `reply` is the shape of its record. Columns in `ignored` are data,
    whatever their names mean elsewhere.
    """

    index: int
    id: RowId | None
    has_own_id: bool
    fields: Mapping[str, Any]
    line: int | None = None
    error: str | None = None
    reply: ReplyFormat = "plain"
    ignored: frozenset[str] = frozenset()

    def asked(self, data_columns: Container[str] = ()) -> dict[str, Any]:
        """The prompt and the options, by our own names; `data_columns` are neither.

        Raises:
            RowError: a value is of a wrong type, or asks for what can't be had.
        """
        return read_fields({name: value for name, value in self.options.items() if name not in data_columns})

    def columns(self, asked: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        """What a prompt may be made of. `asked`: the result of `asked`, if it was called already."""
        return self.fields

    @property
    def watched(self) -> Mapping[str, Any]:
        """Keys that may be options by another name, or misspelt."""
        return self.options

    def check_model(self, names: Container[str]) -> None:
        """
        Raises:
            RowError: it asks for a model other than the one that runs here under `names`.
        """

    @property
    def place(self) -> str:
        """Where the user finds the row."""
        return describe_place(self.index, self.line)

    @property
    def options(self) -> Mapping[str, Any]:
        """The fields that may mean something by their names."""
        return _without(self.fields, self.ignored)


class OpenAIRow(Row):
    """A row of OpenAI's batch format. What it asks for is in its `body`, whose keys are checked with the row."""

    __slots__ = ()

    def asked(self, data_columns: Container[str] = ()) -> dict[str, Any]:
        return plain_fields(self.options)

    def columns(self, asked: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        return self.asked() if asked is None else asked

    @property
    def watched(self) -> Mapping[str, Any]:
        return {}

    def check_model(self, names: Container[str]) -> None:
        check_model(self.fields, names)


def describe_place(index: int, line: int | None) -> str:
    return f"row {index}" if line is None else f"line {line}"


def place_row(raw: RawRow, index: int, ignored: frozenset[str] = frozenset()) -> Row:
    """Gives a raw row its index and id; an id of a wrong type makes it an error row."""
    options = _without(raw.fields, ignored)
    error, reply = raw.error, reply_format(options)
    kind, id_name = (Row, "id") if reply == "plain" else (OpenAIRow, "custom_id")
    given = options.get(id_name)
    if error is None and (given is not None or reply != "plain"):
        error = _id_problem(id_name, given)
    if error is not None:
        message = f"{describe_place(index, raw.line)}: {error}"
        has_id = raw.readable_id is not None
        return kind(index, raw.readable_id, has_id, raw.fields, raw.line, message, reply, ignored)
    has_id = given is not None
    return kind(index, given if has_id else index, has_id, raw.fields, raw.line, None, reply, ignored)


def _without(fields: Mapping[str, Any], ignored: frozenset[str]) -> Mapping[str, Any]:
    return {name: value for name, value in fields.items() if name not in ignored} if ignored else fields


def _id_problem(name: str, value: Any) -> str | None:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        return f"{name} must be an integer or a string, got {short(value)}"
    if isinstance(value, str) and not is_unicode(value):
        return f"{name} holds half of a surrogate pair, which is not Unicode text"
    return None


def look_up(fields: Mapping[str, Any], name: str) -> Any:
    """A column's value; `a.b` is field b of an object in column a, unless a column has that very name.

    Raises:
        KeyError: the row has no such column.
    """
    if name in fields:
        return fields[name]
    value: Any = fields
    for part in name.split("."):
        if not isinstance(value, Mapping):
            raise KeyError(name)
        value = value[part]
    return value


def id_hash(row_id: RowId, salt: int = 0) -> int:
    """A 64-bit number made from a salt and an id. The type counts: 1 and "1" differ."""
    tag = "s" if isinstance(row_id, str) else "i"
    return int.from_bytes(hashlib.blake2b(f"{salt}:{tag}:{row_id}".encode(), digest_size=8).digest(), "big")

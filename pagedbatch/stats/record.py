"""Dataclasses that are read from JSON and written as JSON, checked by their type hints."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, Self, Union, get_args, get_origin, get_type_hints

_CALLED = {dict: "an object", list: "a list", str: "text", bool: "true or false"}


class RecordError(ValueError):
    """JSON that does not fit a record. The message names the first such key: `rows.ok is missing`."""


@dataclass(frozen=True, slots=True)
class Number:
    """The range of a number, both ends included, and its unit for the documentation.

    The default maximum is far above what any run counts, and low enough to be multiplied.
    """

    unit: str = ""
    minimum: float = 0
    maximum: float = 10**15


def key(help: str, *, default: Any = dataclasses.MISSING, optional: bool = False) -> Any:
    """A key of a record, for which `help` is the documentation.

    Args:
        default: for files of older versions, which lack the key.
        optional: the key is written only where its value is not the default, which is None if not given.
    """
    if optional and default is dataclasses.MISSING:
        default = None
    return dataclasses.field(default=default, metadata={"help": help, "optional": optional})


class Record:
    """Base of frozen dataclasses whose fields are made with `key`.

    Their hints are `str`, `bool`, `Any`, `Annotated[int, Number()]` or of `float`, other records, `X | None`, and
    lists, tuples and dicts with text keys of these.
    """

    __slots__ = ()

    @classmethod
    def from_json(cls, value: Any, place: str = "") -> Self:
        """The record in JSON data. Unknown keys are ignored: a newer version may have written them.

        Raises:
            RecordError: a key is missing, or its value does not fit; `place` is where the record is.
        """
        if not isinstance(value, dict):
            raise RecordError(f"{place or 'the file'} is not an object")
        dot = f"{place}." if place else ""
        found = {}
        for field, kind in keys_of(cls):
            if field.name in value:
                found[field.name] = _read(kind, value[field.name], f"{dot}{field.name}")
            elif field.default is dataclasses.MISSING:
                raise RecordError(f"{dot}{field.name} is missing")
        record = cls(**found)
        record.check(dot)
        return record

    @classmethod
    def names(cls) -> list[str]:
        """The keys in the order in which they are written."""
        return [field.name for field, _ in keys_of(cls)]

    def check(self, dot: str) -> None:
        """Raises a RecordError if values contradict each other; names of keys begin with `dot`."""

    def to_json(self) -> dict[str, Any]:
        """The record as JSON data, in the order of its fields."""
        found = {}
        for field, _ in keys_of(type(self)):
            value = getattr(self, field.name)
            if not (field.metadata["optional"] and value == field.default):
                found[field.name] = _written(value)
        return found


def _find_keys(cls: Any) -> list[tuple[dataclasses.Field[Any], Any]]:
    hints = get_type_hints(cls, include_extras=True)
    return [(field, hints[field.name]) for field in dataclasses.fields(cls)]


#: The fields of a record and their hints.
keys_of: Callable[[Any], list[tuple[dataclasses.Field[Any], Any]]] = cache(_find_keys)


def _written(value: Any) -> Any:
    if isinstance(value, Record):
        return value.to_json()
    if isinstance(value, (list, tuple)):
        return [_written(item) for item in value]
    if isinstance(value, Mapping):
        return {name: _written(item) for name, item in value.items()}
    return value


def _read(kind: Any, value: Any, place: str) -> Any:
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _read_number(args[0], args[1], value, place)
    if origin in (Union, UnionType):
        return None if value is None else _read(args[0], value, place)
    if kind is Any:
        return value
    if isinstance(kind, type) and issubclass(kind, Record):
        return kind.from_json(value, place)
    if origin is tuple:
        if not isinstance(value, list) or len(value) != len(args):
            raise RecordError(f"{place} is not a list of {len(args)}")
        pairs = enumerate(zip(args, value, strict=True))
        return tuple(_read(inner, item, f"{place}.{number}") for number, (inner, item) in pairs)
    expected: Any = origin or kind
    if not isinstance(value, expected):
        raise RecordError(f"{place} is not {_CALLED[expected]}")
    if origin is dict:
        return {name: _read(args[1], item, f"{place}.{name}") for name, item in value.items()}
    if origin is list:
        return [_read(args[0], item, f"{place}.{number}") for number, item in enumerate(value)]
    return value


def _read_number(kind: type, limits: Number, value: Any, place: str) -> Any:
    """An int stays one where a float is expected, so that it is written as it was read."""
    is_number = isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
    if not is_number or not limits.minimum <= value <= limits.maximum:
        raise RecordError(f"{place} is not a valid {'count' if kind is int else 'number'}")
    return value

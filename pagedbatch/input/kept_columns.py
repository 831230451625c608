"""Columns of the input that are carried into the records."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from pagedbatch.errors import RowError
from pagedbatch.input.row import look_up
from pagedbatch.wording import short

ALL_COLUMNS = "*"


class KeptColumns:
    """What `--keep` names: columns, fields of objects in them (`meta.level`), or `*` for all.

    A column that a row does not have is null in its record, so that all records have the same keys.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._all = ALL_COLUMNS in names
        listed = {name: None for name in names if name != ALL_COLUMNS}
        self.nothing: bytes | None = json.dumps(listed).encode() if names else None

    def encode(self, fields: Mapping[str, Any]) -> bytes | None:
        """The JSON object of a row's kept columns; None when none are asked for.

        Raises:
            RowError: a value has no JSON form.
        """
        if not self._names:
            return None
        found = dict(fields) if self._all else {}
        for name in self._names:
            if name != ALL_COLUMNS:
                try:
                    found[name] = look_up(fields, name)
                except KeyError:
                    found[name] = None
        try:
            return strict_json(found)
        except (TypeError, ValueError) as error:
            raise RowError(f"--keep: {error}") from None


def strict_json(value: Any) -> bytes:
    """UTF-8 JSON of what a table may hold: dates as ISO text, decimals as text, numbers that are none as null.

    Raises:
        TypeError: a value has no such form.
        ValueError: a text holds half of a surrogate pair.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):
        text = json.dumps(_plain(value), ensure_ascii=False, allow_nan=False)
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise ValueError("a value holds half of a surrogate pair, which is not Unicode text") from None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, (Decimal, datetime.timedelta)):
        return str(value)
    if value is None or isinstance(value, (str, int)):
        return value
    raise TypeError(f"{short(value)} can't be written as JSON")

"""Kept columns: any value that has a JSON form, the same keys in every record."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal
from typing import Any

import pytest

from pagedbatch.errors import RowError
from pagedbatch.input.kept_columns import KeptColumns, strict_json

ROW = {"id": 1, "meta": {"level": 3, "tags": ["x"]}, "a.b": "dot", "text": "é\u2028"}


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        (["text"], {"text": "é\u2028"}),
        (["meta"], {"meta": {"level": 3, "tags": ["x"]}}),
        (["meta.level", "a.b"], {"meta.level": 3, "a.b": "dot"}),
        (["meta.nope", "nope", "id.x"], {"meta.nope": None, "nope": None, "id.x": None}),
        (["*"], ROW),
        (["*", "meta.level"], {**ROW, "meta.level": 3}),
    ],
)
def test_columns_and_fields(names: list[str], kept: dict[str, Any]) -> None:
    encoded = KeptColumns(names).encode(ROW)
    assert encoded is not None
    assert json.loads(encoded) == kept


def test_without_names_nothing_is_kept() -> None:
    assert KeptColumns(()).encode(ROW) is None
    assert KeptColumns(()).nothing is None
    assert KeptColumns(["a", "b"]).nothing == b'{"a": null, "b": null}'
    assert KeptColumns(["*"]).nothing == b"{}"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (float("nan"), "null"),
        ([1.5, float("-inf"), {"x": float("inf")}], '[1.5, null, {"x": null}]'),
        (datetime.datetime(2026, 1, 2, 3, 4), '"2026-01-02T03:04:00"'),
        (datetime.date(2026, 1, 2), '"2026-01-02"'),
        (Decimal("1.10"), '"1.10"'),
        ({1: (True, None)}, '{"1": [true, null]}'),
    ],
)
def test_what_tables_hold(value: Any, text: str) -> None:
    assert strict_json(value) == text.encode()


@pytest.mark.parametrize(("value", "reason"), [(b"raw", "can't be written as JSON"), ("\ud800", "surrogate pair")])
def test_what_has_no_json_form_is_the_rows_error(value: Any, reason: str) -> None:
    with pytest.raises(RowError, match=f"--keep: .*{reason}"):
        KeptColumns(["x"]).encode({"x": value})

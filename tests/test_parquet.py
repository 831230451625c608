"""Parquet output: what the JSONL records say, in columns that are the same for every row and run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from pagedbatch.errors import RunError
from pagedbatch.output.parquet import schema, write_parquet


def _token(token_id: int) -> dict[str, Any]:
    return {"token_id": token_id, "token": "t", "logprob": -0.5}


def _fill_tokens(entries: list[dict[str, Any] | None]) -> None:
    """Null where a token has no `bytes`."""
    for entry in filter(None, entries):
        entry.setdefault("bytes", None)
        _fill_tokens(entry.get("top_logprobs", []))


GOOD = {
    "id": 7,
    "index": 0,
    "status": "ok",
    "outputs": [
        {
            "index": 0,
            "text": "é\n",
            "token_ids": [1, 2],
            "finish_reason": "stop",
            "stop_reason": 2,
            "cumulative_logprob": -0.5,
            "score": None,
            "logprobs": [{**_token(1), "bytes": [240, 159], "top_logprobs": [_token(3)]}],
        }
    ],
    "usage": {"prompt_tokens": 1, "completion_tokens": 2, "cached_tokens": 0, "truncated_tokens": 3},
    "error": None,
    "note": "only 1 of 2 outputs",
    "prompt_logprobs": [None, {**_token(1), "top_logprobs": []}],
    "input": {"tag": [1, "x"]},
}
BAD = {
    "id": None,
    "index": 1,
    "status": "error",
    "outputs": [],
    "usage": {"prompt_tokens": 0, "completion_tokens": 0, "cached_tokens": 0},
    "error": "line 2: no",
}


@pytest.mark.parametrize("records", [[], [GOOD], [BAD], [GOOD, BAD] * 1500])
def test_every_table_has_the_same_columns(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    path = tmp_path / "out.parquet"
    write_parquet(path, (json.dumps(record).encode() for record in records))
    table = parquet.read_table(path)
    assert table.schema.equals(schema())
    rows = table.to_pylist()
    assert len(rows) == len(records)
    for row, record in zip(rows[:2], records, strict=False):
        expected = json.loads(json.dumps(record))
        expected["id"] = None if record["id"] is None else str(record["id"])
        for output in expected["outputs"]:
            output["stop_reason"] = str(output["stop_reason"])
            output.setdefault("reasoning", None)
            _fill_tokens(output["logprobs"])
        _fill_tokens(expected.get("prompt_logprobs", []))
        expected["usage"] = {"truncated_tokens": None, "reasoning_tokens": None} | expected["usage"]
        if "input" in expected:
            expected["input"] = json.dumps(expected["input"])
        assert row == dict.fromkeys(table.column_names) | expected


def test_a_record_that_does_not_fit_is_not_cut_to_fit(tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"
    path.write_bytes(b"old")
    for record, reason in (({**BAD, "extra": 1}, "no column for a record's 'extra'"), ({**BAD, "index": "x"}, "can't")):
        with pytest.raises(RunError, match=reason):
            write_parquet(path, [json.dumps(record).encode()])
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("out.parquet", b"old")]

"""Records as a Parquet file, a few rows in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from pagedbatch.errors import RunError
from pagedbatch.output.durable import replacing
from pagedbatch.wording import first_line

_ROWS_AT_A_TIME = 1024


def schema() -> Any:
    """The columns: the keys of a record, the same for every run.

    `id` and `stop_reason`, which may be numbers or strings, are strings. `input`, the kept columns, is a JSON object as
    a string.
    """
    import pyarrow as pa

    token = [
        ("token_id", pa.int64()),
        ("token", pa.string()),
        ("logprob", pa.float64()),
        ("bytes", pa.list_(pa.uint8())),
    ]
    scored = pa.list_(pa.struct([*token, ("top_logprobs", pa.list_(pa.struct(token)))]))
    output = [
        ("index", pa.int64()),
        ("text", pa.string()),
        ("token_ids", pa.list_(pa.int64())),
        ("finish_reason", pa.string()),
        ("stop_reason", pa.string()),
        ("cumulative_logprob", pa.float64()),
        ("score", pa.float64()),
        ("logprobs", scored),
        ("reasoning", pa.string()),
    ]
    counts = ("prompt_tokens", "completion_tokens", "cached_tokens", "truncated_tokens", "reasoning_tokens")
    usage = [(name, pa.int64()) for name in counts]
    return pa.schema(
        [
            ("id", pa.string()),
            ("index", pa.int64()),
            ("status", pa.string()),
            ("outputs", pa.list_(pa.struct(output))),
            ("usage", pa.struct(usage)),
            ("error", pa.string()),
            ("note", pa.string()),
            ("prompt_logprobs", scored),
            ("input", pa.string()),
        ]
    )


def write_parquet(path: Path, records: Iterable[bytes]) -> None:
    """Replaces `path` by a Parquet file of `records`.

    Raises:
        RunError: the disk is full or fails, or a record has a key that the schema lacks; `path` is as it was.
    """
    import pyarrow as pa
    from pyarrow import parquet

    columns = schema()
    rows = map(_row, records)
    try:
        with replacing(path) as file, parquet.ParquetWriter(file, columns, compression="zstd") as writer:
            while batch := list(islice(rows, _ROWS_AT_A_TIME)):
                for row in batch:
                    unknown = row.keys() - set(columns.names)
                    if unknown:
                        raise RunError(f"{path}: Parquet output has no column for a record's {min(unknown)!r}")
                writer.write_table(pa.Table.from_pylist(batch, schema=columns))
    except (pa.ArrowException, OverflowError) as error:
        raise RunError(f"can't write {path}: {first_line(error)}") from error
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise RunError(f"can't write {path}: a record is none that this version writes: {first_line(error)}") from error


def _row(record: bytes) -> dict[str, Any]:
    row: dict[str, Any] = json.loads(record)
    row["id"] = _text(row["id"])
    for output in row["outputs"]:
        output["stop_reason"] = _text(output["stop_reason"])
    if "input" in row:
        row["input"] = json.dumps(row["input"], ensure_ascii=False)
    return row


def _text(value: Any) -> str | None:
    return None if value is None else str(value)

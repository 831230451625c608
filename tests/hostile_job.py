"""Runs a job of healthy rows with others between them, and says what became of the healthy ones. Knows no test."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hostile import HEALTHY
from tiny_job import SilentView

from pagedbatch.run.job import run_job
from pagedbatch.settings import merge

Record = dict[str, Any]


def run_lines(folder: Path, model: Path, lines: Sequence[bytes], **given: Any) -> tuple[int, list[Record]]:
    """The exit code of a job of these lines, and its records; whatever is raised goes through."""
    (folder / "in.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    settings = {
        "input": str(folder / "in.jsonl"), "output": str(folder / "out.jsonl"), "model": str(model),
        "allow_duplicate_ids": True, "num_blocks": 300, "max_num_seqs": 16, "dtype": "float32", "restart": True,
    }  # fmt: skip
    result = run_job(merge({**settings, **given}, {}), lambda *_: SilentView())
    with (folder / "out.jsonl").open(encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    return result.exit_code, records


def healthy_among(records: Sequence[Record]) -> list[str]:
    """What the healthy rows came to, without their place and cache hits, which tell of their neighbours."""
    wanted = {row["id"] for row in HEALTHY}
    found = [record for record in records if record.get("id") in wanted]
    for record in found:
        del record["index"], record["usage"]["cached_tokens"]
    return [json.dumps(record) for record in found]


def between_healthy(lines: Sequence[bytes]) -> list[bytes]:
    """The lines, spread between the healthy rows."""
    healthy = [json.dumps(row).encode() for row in HEALTHY]
    size = -(-len(lines) // len(healthy))
    return [line for i, row in enumerate(healthy) for line in (row, *lines[i * size : (i + 1) * size])]

"""Journals of five small rows, for tests."""

from __future__ import annotations

import json
from pathlib import Path

from pagedbatch.fingerprint import Content
from pagedbatch.output.journal import Journal
from pagedbatch.output.manifest import Manifest
from pagedbatch.stats.schema import ModelIdentity

MANIFEST = Manifest(
    input=Content("in.jsonl", 3, ("f00",)),
    model=ModelIdentity(name="M", fingerprint="abc"),
    settings={"temperature": 0.5, "stop": ("a",), "dtype": "auto"},
    versions={"pagedbatch": "1"},
)


def record(row: int) -> bytes:
    return json.dumps({"id": f"é\n{row}", "text": ', "journal": {"row": 9}}'}).encode()


def fill(path: Path, rows: list[int], num_rows: int = 5) -> bytes:
    with Journal.open(path, MANIFEST, num_rows=num_rows) as journal:
        for row in rows:
            journal.append(row, record(row), ok=row % 2 == 0)
    return path.read_bytes()


def finished_rows(journal: Journal, num_rows: int = 5) -> list[bytes]:
    """The finished rows' records, each checked to be the one that was written."""
    records = list(journal.records())
    assert records == [record(row) for row in range(num_rows) if row in journal]
    return records

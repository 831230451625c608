"""docs/stats.md describes every key of OUT.stats.json, and is what its script writes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from stats_files import run_stats

from pagedbatch.stats import schema
from pagedbatch.stats.record import Record, keys_of

DOCS = Path(__file__).resolve().parent.parent / "docs"
sys.path.insert(0, str(DOCS))

from make_stats import PAGE, page  # noqa: E402

RECORDS = [
    kind for kind in vars(schema).values() if isinstance(kind, type) and issubclass(kind, Record) and kind is not Record
]


def names(value: Any) -> set[str]:
    """Every key in JSON data, but the names of settings and libraries."""
    if isinstance(value, list):
        return set().union(*map(names, value))
    if not isinstance(value, dict):
        return set()
    own = {name for name in value if name not in ("settings", "versions")}
    return own.union(*(names(value[name]) for name in own))


def test_every_key_is_described() -> None:
    keys = [(kind.__name__, field) for kind in RECORDS for field, _ in keys_of(kind)]
    assert len(keys) > 100
    assert [f"{kind}.{field.name}" for kind, field in keys if not field.metadata["help"].strip()] == []
    assert [kind.__name__ for kind in RECORDS if not kind.__doc__] == []


def test_the_page_is_what_its_script_writes() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python docs/make_stats.py"


def test_the_page_has_every_key_of_a_run() -> None:
    written = names(json.loads(json.dumps(run_stats())))
    described = PAGE.read_text(encoding="utf-8")
    assert [name for name in sorted(written) if f"`{name}`" not in described] == []

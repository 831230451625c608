"""Stats files that are cut, changed or made up: one line, whatever reads them."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stats_files import run_stats, shown

from pagedbatch.cli.report import open_stats, write_page
from pagedbatch.errors import UsageError
from pagedbatch.printable import printable_values
from pagedbatch.report.details import details
from pagedbatch.stats.merge import merge_shards
from pagedbatch.stats.record import RecordError
from pagedbatch.stats.schema import Stats

_WORKER = {"node": "n", "rows": 1, "restarts": 0, "rows_again": 0}


def full_stats() -> dict[str, Any]:
    """Of a run with workers, and a block map."""
    stats: dict[str, Any] = json.loads(json.dumps(run_stats()))
    held = [{"row": 0, "num_blocks": 3, "runs": [[0, 2], [-1, 1]]}]
    stats["memory"]["peak_map"] = {"live_blocks": 2, "num_sequences": 1, "held": held}
    pool = {name: value for name, value in stats["memory"].items() if name not in ("contiguous", "peak_map")}
    stats["workers"] = [_WORKER | {"memory": pool, "time": stats["time"]}]
    return stats


def part_stats(first: int = 0) -> dict[str, Any]:
    stats = full_stats()
    del stats["workers"]
    content = {"name": "in.jsonl", "size": 9, "hash": "f00"}
    model = {"name": "M", "fingerprint": "abc"}
    shard = {"shard": "0/2", "first_row": first, "num_rows": 10, "of_rows": 20, "settings": {}}
    return stats | {"shard": shard | {"input": content, "model": model}}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in JSON data but the root."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        yield (*path, name)
        yield from places(item, (*path, name))


def changed(stats: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """A copy with another value at `path`; without any if it is `...`."""
    found = copy.deepcopy(stats)
    inner: Any = found
    for name in path[:-1]:
        inner = inner[name]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return found


def problem(stats: Any) -> str | None:
    """Why JSON data is no stats file; None if it is."""
    try:
        Stats.from_json(stats)
    except RecordError as error:
        return str(error)
    return None


ODD = st.sampled_from(
    [..., None, True, -1, 0, 1, 3, 0.5, 1.5, 1e300, 10**400, float("nan"), float("inf"), "", "$x$", "\x1b[31m", [], {}]
) | st.recursive(st.integers() | st.text(max_size=3), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))
FULL, PART = full_stats(), part_stats()


@settings(max_examples=300)
@given(st.sampled_from(sorted(places(FULL), key=repr)), ODD)
def test_what_passes_can_be_shown(path: tuple[Any, ...], value: Any) -> None:
    stats = changed(FULL, path, value)
    if problem(stats) is not None:
        return
    for lines in (shown(printable_values(stats)), shown(printable_values(stats), details)):
        assert not any("\x1b" in line for line in lines)


@settings(max_examples=100)
@given(st.sampled_from(sorted(places(PART), key=repr)), ODD)
def test_what_passes_can_be_merged(path: tuple[Any, ...], value: Any) -> None:
    stats = changed(PART, path, value)
    if problem(stats) is None:
        merged = merge_shards({"a": Stats.from_json(stats), "b": Stats.from_json(PART)}, "out.jsonl").to_json()
        assert problem(merged) is None
        shown(merged, details)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("rows", "total"), "9", "rows.total is not a valid count"),
        (("memory", "kv_used"), 2, "memory.kv_used is not a valid number"),
        (("memory", "num_blocks"), 0, "memory.kv_used is a share of no blocks"),
        (("timeline", 1, "logical"), 3, "timeline.1.logical is less than its blocks"),
        (("timeline",), {}, "timeline is not a list"),
        (("settings", "model"), "M", "settings.model is not an object"),
        (("versions", "torch"), 2, "versions.torch is not text"),
        (("lengths", "prompt", "histogram"), [[1, 2]], "lengths.prompt.histogram.0 is not a list of 3"),
        (
            ("memory", "peak_map", "held", 0, "runs"),
            [[0, 10**9]],
            "memory.peak_map.held.0.runs.0.1 is not a valid count",
        ),
        (("workers", 0, "node"), ..., "workers.0.node is missing"),
        (("memory",), None, "shards is missing"),
    ],
)
def test_the_first_key_that_does_not_fit_is_named(path: tuple[Any, ...], value: Any, message: str) -> None:
    assert problem(FULL) is None
    assert problem(changed(FULL, path, value)) == message


@pytest.mark.parametrize("stats", [FULL, PART], ids=["workers", "shard"])
def test_what_was_read_is_written_again_in_the_same_order(stats: dict[str, Any]) -> None:
    written = Stats.from_json(stats).to_json()
    assert written == stats
    for section in ("rows", "throughput", "memory", "time"):
        assert list(written[section]) == list(stats[section])


def test_keys_that_a_newer_version_wrote_are_ignored() -> None:
    newer = changed(changed(FULL, ("new",), [1]), ("memory", "new"), {"a": None})
    assert Stats.from_json(newer) == Stats.from_json(FULL)


def test_keys_that_an_older_version_did_not_write_have_defaults() -> None:
    older = FULL
    for path in (("lengths",), ("workers",), ("memory", "failed_steps"), ("memory", "swap_seconds")):
        older = changed(older, path, ...)
    stats = Stats.from_json(older)
    assert (stats.lengths, stats.workers, stats.memory.failed_steps, stats.memory.swap_seconds) == (None, None, 0, None)
    assert "swap_seconds" not in stats.to_json()["memory"]


def test_shards_are_looked_into() -> None:
    merged = merge_shards({"a": Stats.from_json(PART), "b": Stats.from_json(part_stats(10))}, "out.jsonl").to_json()
    assert problem(merged) is None
    broken = changed(merged, ("shards", 0, "stats", "rows"), 7)
    assert problem(broken) == "shards.0.stats.rows is not an object"


@pytest.mark.parametrize("data", [b"[" * 100_000, b"\xff", b"", b"7", b"{}", b'{"settings": []}'])
def test_a_file_of_anything_is_a_line(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.stats.json"
    path.write_bytes(data)
    with pytest.raises(UsageError, match="not a stats file"):
        open_stats(path)


def test_a_page_shows_hostile_texts_as_text(tmp_path: Path) -> None:
    stats = changed(FULL, ("settings", "model", "value"), "<script>alert(1)</script>\x1b[31m\u202e")
    stats = changed(stats, ("versions", "<b>"), "$x$ <i>")
    stats = changed(stats, ("time", "<u>$"), 1.0)
    write_page(tmp_path / "page.html", {"<a>\x1b": Stats.from_json(stats), "b": Stats.from_json(FULL)})
    page = (tmp_path / "page.html").read_text()
    for wrong in ("<script>", "<i>", "<u>", "<b>$", "<a>", "\x1b", "\u202e"):
        assert wrong not in page
    assert "&lt;script&gt;" in page

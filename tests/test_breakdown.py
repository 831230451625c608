"""Workers and shards in the reports: who did how much, who died, and that it fits a terminal."""

from __future__ import annotations

from typing import Any

import pytest
from stats_files import run_stats, shown

from pagedbatch.report.details import details
from pagedbatch.report.summary import summary


def worker(number: int, scale: int = 1, restarts: int = 0, rows_again: int = 0) -> dict[str, Any]:
    own = run_stats(scale)
    counts = {"rows": 10 * scale + number, "restarts": restarts, "rows_again": rows_again}
    return {"node": f"192.168.100.{100 + number}", **counts, "memory": own["memory"], "time": own["time"]}


def with_workers(*workers: dict[str, Any], scale: int = 1) -> dict[str, Any]:
    return run_stats(scale) | {"workers": list(workers)}


def line_of(lines: list[str], label: str) -> str:
    return next(line for line in lines if line.split()[:1] == [label])


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ([], "none started; none restarted"),
        ([worker(0)], "1: 10 rows; none restarted"),
        ([worker(3), worker(3)], "2: 13 rows each; none restarted"),
        (
            [worker(2), worker(0), worker(1, restarts=2, rows_again=9)],
            "3: 10 to 12 rows each; 2 restarted, 9 rows run again",
        ),
    ],
)
def test_the_summary_tells_how_rows_were_spread_and_who_died(workers: list[dict[str, Any]], expected: str) -> None:
    assert line_of(shown(with_workers(*workers)), "workers") == f"workers   {expected}"


def test_the_details_have_a_line_a_worker_and_one_of_all() -> None:
    lines = shown(with_workers(worker(0), worker(1, restarts=1, rows_again=4)), details, width=100)
    start = lines.index(line_of(lines, "Worker"))
    assert [line.split() for line in lines[start : start + 4]] == [
        ["Worker", "Machine", "Rows", "Died", "Again", "Live", "Saved", "KV", "used", "Busy"],
        ["0", "192.168.100.100", "10", "0", "0", "50.0%", "50.0%", "75.0%", "2", "s"],
        ["1", "192.168.100.101", "11", "1", "4", "50.0%", "50.0%", "75.0%", "2", "s"],
        ["all", "21", "1", "4", "50.0%", "50.0%", "75.0%", "2", "s"],
    ]


def test_one_machine_needs_no_name() -> None:
    lines = shown(with_workers(worker(0), worker(0)), details)
    assert "Machine" not in line_of(lines, "Worker")
    assert "192.168" not in "".join(lines)


@pytest.mark.parametrize("scale", [1, 40_000])
@pytest.mark.parametrize("kind", ["workers", "shards"])
def test_the_table_fits_80_columns(kind: str, scale: int) -> None:
    stats = with_workers(worker(0, scale), worker(1, scale, restarts=12, rows_again=1234))
    if kind == "shards":
        del stats["workers"]
        stats["shards"] = [{"file": f"{'folder/' * 20}part-{i}.jsonl", "stats": run_stats(scale)} for i in (1, 2)]
    for show in (summary, details):
        lines, wide = (shown(stats, show, width=width) for width in (80, 200))
        assert all(len(line) <= 80 for line in lines)
        assert [line.rstrip() for line in lines] == [line.rstrip() for line in wide], "nothing is cut or wrapped"


def test_shards_are_named_by_their_files() -> None:
    stats = run_stats() | {"shards": [{"file": f"out/part-{i}.jsonl", "stats": run_stats()} for i in range(2)]}
    assert line_of(shown(stats), "shards") == "shards    2: 10 rows each"
    assert line_of(shown(stats, details), "part-1.jsonl").split()[1:4] == ["10", "1", "30"]


def test_a_run_in_one_process_says_nothing_of_them() -> None:
    assert not any(line.startswith(("workers", "shards")) for line in shown(run_stats()))
    assert not any(line.startswith(("Worker", "Shard")) for line in shown(run_stats(), details))

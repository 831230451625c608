"""Rows per second through one job whose workers take no time, and its memory.

    PYTHONPATH=tests python benchmarks/bench_workers.py [ROWS ...]

Each count of rows runs in a process of its own: JSONL in, Ray Data, two workers with real engines around a runner that
takes no time, the journal, JSONL out. By default 20,000 rows, then 200,000. Memory is that of the job's process.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tiny_job import SilentView
from tiny_workers import tiny_workers

from pagedbatch.run.job import Ui, run_job
from pagedbatch.settings import merge


class TimedView(SilentView):
    """Notes how long rows came in, from the first answer seen to the last."""

    first: float | None = None
    last = 0.0
    rows = 0

    def update(self, snapshot: object, rows_done: int, *_: object) -> None:
        if rows_done > self.rows:
            self.last = time.perf_counter()
            self.first = self.first or self.last
            self.rows = rows_done


def run(num_rows: int, num_workers: int, folder: Path) -> None:
    """One job; prints its figures as JSON."""
    source, output = folder / "in.jsonl", folder / "out.jsonl"
    with source.open("w") as file:
        file.writelines(f'{{"id": "row-{i}", "prompt": "row {i}", "tag": {i % 7}}}\n' for i in range(num_rows))
    given = {"input": str(source), "model": "none", "output": str(output), "max_tokens": 1, "workers": num_workers}
    view = TimedView()
    with tiny_workers():
        began = time.perf_counter()
        result = run_job(merge(given, {}), Ui(notice=print, open_view=lambda *_: view))
        seconds = time.perf_counter() - began
    assert result.exit_code == 0
    with output.open() as file:
        assert all(json.loads(line)["index"] == i for i, line in enumerate(file))
    assert view.first is not None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    figures = {
        "rows": num_rows,
        "seconds": round(seconds, 2),
        "rows_per_second": round(num_rows / (view.last - view.first)),
        "peak_MiB": round(peak),
        "workers": [worker.rows for worker in result.stats.workers],
    }
    print(json.dumps(figures))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=int, nargs="*", default=[20_000, 200_000])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    for num_rows in arguments.rows:
        if not arguments.here:
            command = [sys.executable, __file__, "--here", "--workers", str(arguments.workers), str(num_rows)]
            subprocess.run(command, check=True)
            continue
        with tempfile.TemporaryDirectory() as folder:
            run(num_rows, arguments.workers, Path(folder))


if __name__ == "__main__":
    main()

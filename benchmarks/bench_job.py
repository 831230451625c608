"""Rows per second and peak memory of everything around the model.

    PYTHONPATH=tests python benchmarks/bench_job.py [ROWS ...]

Each count of rows runs in a process of its own: JSONL in, reader, prompts, scheduler, journal, finisher, JSONL out, and
a runner that takes no time. By default 1,000 rows, then 1,000,000. `--profile` names the functions that cost most.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tiny_job import SilentView, without_model

from pagedbatch.run.job import Ui, run_job
from pagedbatch.settings import merge


def run(num_rows: int, folder: Path) -> None:
    """One job; prints its figures as JSON."""
    source, output = folder / "in.jsonl", folder / "out.jsonl"
    with source.open("w") as file:
        file.writelines(f'{{"id": "row-{i}", "prompt": "row {i}", "tag": {i % 7}}}\n' for i in range(num_rows))
    given = {"input": str(source), "model": "none", "output": str(output), "max_tokens": 1}
    ui = Ui(notice=print, open_view=lambda *_: SilentView())
    with without_model():
        began = time.perf_counter()
        result = run_job(merge(given, {}), ui)
        seconds = time.perf_counter() - began
    assert result.exit_code == 0
    with output.open() as file:
        assert all(json.loads(line)["index"] == i for i, line in enumerate(file))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        json.dumps(
            {
                "rows": num_rows,
                "seconds": round(seconds, 2),
                "rows_per_second": round(num_rows / seconds),
                "peak_MiB": round(peak),
            }
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=int, nargs="*", default=[1000, 1_000_000])
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    for num_rows in arguments.rows:
        if not (arguments.here or arguments.profile):
            subprocess.run([sys.executable, __file__, "--here", str(num_rows)], check=True)
            continue
        with (
            tempfile.TemporaryDirectory() as folder,
            cProfile.Profile() if arguments.profile else SilentView() as profile,
        ):
            run(num_rows, Path(folder))
        if isinstance(profile, cProfile.Profile):
            pstats.Stats(profile).sort_stats("tottime").print_stats(35)


if __name__ == "__main__":
    main()

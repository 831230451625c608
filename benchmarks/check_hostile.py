"""Thousands of hostile rows. No test runs it.

    PYTHONPATH=tests python benchmarks/check_hostile.py [ROWS = 20,000]

Each job has ten of them between healthy rows, whose output must be the same as alone. Any exception ends the check.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from hostile import LINES
from hostile_job import between_healthy, healthy_among, run_lines
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from models import rand_model

_ROWS_A_JOB = 10
#: What hypothesis remembers of its examples is megabytes a job: it forgets between rounds.
_JOBS_A_ROUND = 200


def main() -> None:
    num_rows = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    with tempfile.TemporaryDirectory() as scratch:
        model, folder = Path(scratch) / "model", Path(scratch) / "job"
        folder.mkdir()
        rand_model(model)
        _, records = run_lines(folder, model, between_healthy([]))
        alone = healthy_among(records)
        counts = {"jobs": 0, "errors": 0, "answers": 0}

        @settings(max_examples=_JOBS_A_ROUND, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(lines=st.lists(LINES, min_size=_ROWS_A_JOB, max_size=_ROWS_A_JOB))
        def check(lines: list[bytes]) -> None:
            exit_code, records = run_lines(folder, model, between_healthy(lines))
            assert exit_code in (0, 3)
            failed = sum(record["error"] is not None for record in records)
            counts["jobs"] += 1
            counts["errors"] += failed
            counts["answers"] += len(records) - failed
            if counts["jobs"] % 100 == 0:
                print(counts, file=sys.stderr)
            assert healthy_among(records) == alone

        for number in range(-(-num_rows // (_ROWS_A_JOB * _JOBS_A_ROUND))):
            seed(number)(check)()
        print(f"{counts}: all healthy rows as alone")


if __name__ == "__main__":
    main()

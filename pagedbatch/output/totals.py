"""What a run did, in counts and moments."""

from __future__ import annotations

import time
from dataclasses import dataclass

from pagedbatch.output.finished_row import FinishedRow


@dataclass(slots=True)
class Totals:
    """Rows and tokens of this run, without resumed rows. Times are `time.perf_counter` seconds; None: not yet."""

    rows_ok: int = 0
    rows_error: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    first_step_at: float | None = None
    last_row_at: float | None = None

    @property
    def rows_done(self) -> int:
        return self.rows_ok + self.rows_error

    @property
    def seconds(self) -> float:
        """From the first step to the last row."""
        if self.first_step_at is None or self.last_row_at is None:
            return 0.0
        return max(0.0, self.last_row_at - self.first_step_at)

    def add(self, finished: FinishedRow) -> None:
        """Counts a row that has just finished."""
        self.rows_ok += finished.ok
        self.rows_error += not finished.ok
        self.prompt_tokens += finished.num_prompt_tokens
        self.output_tokens += finished.num_output_tokens
        self.last_row_at = time.perf_counter()

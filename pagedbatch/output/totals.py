"""What a run did, in counts and moments. Knows finished rows only."""

from __future__ import annotations

import time
from dataclasses import dataclass

from pagedbatch.output.finished_row import Answer


@dataclass(slots=True)
class Totals:
    """What a run did. Times are `time.perf_counter` seconds, None while it did not happen."""

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

    def add(self, answer: Answer) -> None:
        """Counts a row that has just been finished."""
        self.rows_ok += answer.ok
        self.rows_error += not answer.ok
        self.prompt_tokens += answer.num_prompt_tokens
        self.output_tokens += answer.num_output_tokens
        self.last_row_at = time.perf_counter()

"""The rows of an input that a run still has to answer. Knows no engine; can be sent to another process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pagedbatch.job.reader import Source
from pagedbatch.job.rows import Row


@dataclass(frozen=True, slots=True)
class Unfinished:
    """The first `num_rows` rows of `source` without those that are finished: `finished` has a byte a row, 0 if not."""

    source: Source
    num_rows: int
    finished: bytes

    @property
    def num_unfinished(self) -> int:
        return self.finished.count(0)

    def __iter__(self) -> Iterator[Row]:
        return (row for row in self.source.rows(self.num_rows) if not self.finished[row.index])

"""The rows of an input that a run still has to answer. They can be sent to another process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pagedbatch.input.reader import Source
from pagedbatch.input.row import Row


@dataclass(frozen=True, slots=True)
class PendingRows:
    """Iterates over those `rows` of `source` that are not finished. `finished` has a byte per row, 0 if it is not."""

    source: Source
    rows: range
    finished: bytes

    @property
    def num_pending(self) -> int:
        return self.finished.count(0)

    def __iter__(self) -> Iterator[Row]:
        rows = self.source.rows(self.rows.stop, first=self.rows.start)
        return (row for row in rows if not self.finished[row.index - self.rows.start])

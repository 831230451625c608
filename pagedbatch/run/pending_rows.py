"""The rows of an input that a run still has to answer. Knows no engine; can be sent to another process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pagedbatch.input.reader import Source
from pagedbatch.input.row import Row


@dataclass(frozen=True, slots=True)
class Unfinished:
    """Those `rows` of `source` that are not finished: `finished` has a byte for each of `rows`, 0 if not."""

    source: Source
    rows: range
    finished: bytes

    @property
    def num_unfinished(self) -> int:
        return self.finished.count(0)

    def __iter__(self) -> Iterator[Row]:
        mine = self.source.rows(self.rows.stop, first=self.rows.start)
        return (row for row in mine if not self.finished[row.index - self.rows.start])

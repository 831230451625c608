"""`--shard I/N`: which rows of the input a run takes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Self

from pagedbatch.errors import UsageError

_FORM = re.compile(r"(\d{1,9})/(\d{1,9})")


@dataclass(frozen=True, slots=True)
class Shard:
    """Shard `index` of `count`, counted from 0, as Slurm counts the tasks of a job array."""

    index: int
    count: int

    @classmethod
    def parse(cls, value: Any) -> Self:
        """The shard named `I/N`.

        Raises:
            UsageError: `value` is not such a name.
        """
        form = _FORM.fullmatch(value) if isinstance(value, str) else None
        if form is None:
            raise UsageError(f"--shard must be I/N, such as 0/4 for the first of four, got {value!r}")
        index, count = int(form[1]), int(form[2])
        if index >= count:
            last = f"the last of {count} is {count - 1}/{count}" if count else "there must be at least one"
            raise UsageError(f"--shard {value}: shards count from 0, and {last}")
        return cls(index, count)

    @classmethod
    def of_row(cls, row: int, num_rows: int, count: int) -> Self:
        """The shard out of `count` that holds `row` of `num_rows`."""
        return cls(((row + 1) * count - 1) // num_rows, count)

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def rows(self, num_rows: int) -> range:
        """Its rows out of `num_rows`: consecutive, so that rows with a common prefix mostly stay together.

        Every row is in exactly one of the `count` shards, and their sizes differ by at most one.
        """
        return range(self.index * num_rows // self.count, (self.index + 1) * num_rows // self.count)


def rows_to_run(shard: str | None, num_rows: int) -> range:
    """The rows out of `num_rows` that a run takes: all of them without a shard."""
    return range(num_rows) if shard is None else Shard.parse(shard).rows(num_rows)


def shard_settings(shard: str | None, rows: range, num_rows: int) -> dict[str, str]:
    """What a shard adds to the settings of the manifest. Its rows are other ones when the input grows."""
    return {} if shard is None else {"shard": shard, "rows": f"{name_rows(rows)} of {num_rows}"}


def name_rows(rows: range) -> str:
    """`3-7`, both ends included."""
    if not rows:
        return "none"
    return f"{rows[0]}-{rows[-1]}" if len(rows) > 1 else str(rows[0])

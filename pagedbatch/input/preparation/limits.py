"""What preparing rows may take."""

from __future__ import annotations

from dataclasses import dataclass

#: Maximum number of rows that are read ahead of the one that is being prepared.
MAX_ROWS_AHEAD = 64


@dataclass(frozen=True, slots=True)
class RowLimits:
    """Bounds of one row, beside what the process that prepares it has anyway.

    `cpu_seconds` are those of all its threads together: a busy machine makes no row an error. `stalled_seconds`, of a
    clock, is for a process that no longer computes anything.
    """

    cpu_seconds: float = 5.0
    memory_bytes: int = 2**30
    stalled_seconds: float = 60.0

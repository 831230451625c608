"""What preparing one row may take. Plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RowLimits:
    """Bounds of one row, beside what the process that prepares it has anyway.

    `cpu_seconds` are those of all its threads together: a busy machine makes no row an error. `stalled_seconds`, of a
    clock, is for a process that no longer computes anything.
    """

    cpu_seconds: float = 5.0
    memory_bytes: int = 2**30
    stalled_seconds: float = 60.0

"""Every error that a user can cause or meet, with the exit code that it leads to."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """How a command ended. Scripts rely on the numbers."""

    OK = 0
    """Every row is ok."""
    FAILED = 1
    """The run failed; the journal is kept."""
    USAGE = 2
    """Wrong usage or settings; nothing was started."""
    ROW_ERRORS = 3
    """Finished, and some rows are errors."""
    INTERRUPTED = 130
    """Ctrl-C or SIGTERM; the journal is kept."""


class PagedBatchError(Exception):
    """Base class: the message is one line that says what, where and what to do."""

    exit_code = ExitCode.FAILED


class UsageError(PagedBatchError):
    """Wrong usage or settings, found before anything started."""

    exit_code = ExitCode.USAGE


class RunError(PagedBatchError):
    """The run as a whole failed; finished rows stand in the journal."""


class RowError(PagedBatchError):
    """One row can't be answered; the others go on."""


class ParamError(RowError):
    """A generation parameter has a wrong type or value, or can't be combined with another."""


class UnsupportedModelError(UsageError):
    """The model needs something that this engine does not have."""


class EngineStalledError(RunError):
    """A step scheduled nothing although work is left: a bug, reported with the state instead of a loop."""


class BlockAccountingError(RunError):
    """A block was freed twice, written while shared, or lost: a bug, reported at once."""

"""Decides about a row whose process ended: an error with its reason, or another try.

A schema, grammar or list that was too much once is refused the next time. A chat template is the model's, and all rows
share it: where it was too much for several rows in a row, it gets little time until it comes to an end again.
"""

from __future__ import annotations

import logging
import signal
from dataclasses import dataclass

from pagedbatch.input.preparation.board import Progress
from pagedbatch.input.preparation.limits import RowLimits
from pagedbatch.preparation_steps import CHAT_TEMPLATE, READING

_log = logging.getLogger(__name__)

#: Exit code of a process that had no memory left for a row.
EXIT_MEMORY = 75
#: The signal by which the system ends a process whose CPU time is used up.
TIME_SIGNAL = signal.SIGPROF

#: Rows in a row for which the chat template may be too much, before it gets so little time. A template that ends takes
#: milliseconds; long chats get more, by their size.
_MAX_STRIKES = 3
_LITTLE_SECONDS = 0.1
#: Sources that are remembered as too much.
_MAX_REFUSED = 1000


@dataclass(frozen=True, slots=True)
class Ending:
    """How a process ended over a row.

    `exit_code` is that of `os.waitstatus_to_exitcode`, negative for a signal; None: it was ended because it stood
    still. `is_fresh`: the row was its first. `is_retry`: the row has ended a process before.
    """

    exit_code: int | None
    progress: Progress
    is_fresh: bool
    is_retry: bool


class Verdicts:
    """The memory of a run about what was too much."""

    def __init__(self, limits: RowLimits) -> None:
        self._limits = limits
        self._strikes = 0
        #: Sources that are refused, each with the reason.
        self.refused: dict[str, str] = {}
        #: CPU seconds that the chat template gets; None: no less than the row.
        self.template_seconds: float | None = None

    def verdict(self, ending: Ending) -> str | None:
        """Why the row is an error; None: it is to be tried again, in a new process."""
        progress = ending.progress
        little = self.template_seconds if progress.step == CHAT_TEMPLATE and not progress.has_rendered else None
        if progress.has_rendered:
            self._strikes, self.template_seconds = 0, None
        if not self._is_final(ending):
            return None
        step = progress.step or READING
        reason = f"{step} {self._what_happened(ending, little)}"
        if progress.source and len(self.refused) < _MAX_REFUSED:
            self.refused[progress.source] = f"for an earlier row, {reason}"
        if step == CHAT_TEMPLATE:
            self._strike(reason)
        return reason

    def _is_final(self, ending: Ending) -> bool:
        if ending.exit_code == -TIME_SIGNAL or ending.is_retry:
            return True
        return ending.exit_code == EXIT_MEMORY and ending.is_fresh

    def _what_happened(self, ending: Ending, little: float | None) -> str:
        if ending.exit_code == -TIME_SIGNAL and little is not None:
            return f"took more than {little:g} s of CPU time; it gets no more, as it was too much for the rows before"
        if ending.exit_code == -TIME_SIGNAL:
            return f"took more than {self._limits.cpu_seconds:g} s of CPU time (--row-prepare-timeout)"
        if ending.exit_code == EXIT_MEMORY:
            return f"took more than {self._limits.memory_bytes / 2**30:g} GiB of memory"
        if ending.exit_code is None:
            return f"stood still for {self._limits.stalled_seconds:g} s, and again when it was tried once more"
        how = f"exit code {ending.exit_code}" if ending.exit_code >= 0 else signal.Signals(-ending.exit_code).name
        return f"ended its process ({how}), and again when it was tried once more: often memory was not enough"

    def _strike(self, reason: str) -> None:
        self._strikes += 1
        if self._strikes >= _MAX_STRIKES and self.template_seconds is None:
            self.template_seconds = min(_LITTLE_SECONDS, self._limits.cpu_seconds)
            _log.warning(
                "%d rows in a row: %s; the template gets %g s a row, and a second more for each MiB of it, "
                "until it comes to an end again",
                _MAX_STRIKES,
                reason,
                self.template_seconds,
            )

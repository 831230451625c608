"""Ctrl-C and SIGTERM: asks a run to end after its step, and ends it at once when asked again."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Any, Self

from pagedbatch.errors import ExitCode

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """While entered, a first signal sets `requested` if `deferred` is set, else raises `KeyboardInterrupt`.

    Before the first step there is nothing to save, so nothing is deferred; from then on the loop looks at `requested`.
    """

    def __init__(self) -> None:
        self.requested = False
        self.deferred = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.deferred:
            raise KeyboardInterrupt
        if self.requested:
            if sys.stderr.isatty():
                os.write(sys.stderr.fileno(), b"\x1b[?25h\n")  # the display had hidden the cursor
            os._exit(ExitCode.INTERRUPTED)
        self.requested = True

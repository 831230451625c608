"""The one way from a command to stderr."""

from __future__ import annotations

import logging
import sys

from pagedbatch.printable import printable


def say(text: str) -> None:
    """Prints a line, in which whatever came from a file, a model or another library can't steer the terminal."""
    print(printable(text), file=sys.stderr)


class _Terminal(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())


def show_log() -> None:
    """Shows what our packages log on stderr, one line each, and nowhere else. Other libraries' logs are left alone."""
    for name in ("pagedbatch", "pagedbatch_kernels"):
        logger = logging.getLogger(name)
        logger.handlers = [_Terminal()]
        logger.setLevel(logging.INFO)
        logger.propagate = False

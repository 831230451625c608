"""What the program logs, as lines, for tests that read what a user is told."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class _Keeper(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())


@contextmanager
def log_lines(lines: list[str] | None = None, package: str = "pagedbatch") -> Iterator[list[str]]:
    """Adds what a package logs meanwhile to `lines`."""
    lines = [] if lines is None else lines
    logger, keeper = logging.getLogger(package), _Keeper(lines)
    level = logger.level
    logger.addHandler(keeper)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(keeper)
        logger.setLevel(level)

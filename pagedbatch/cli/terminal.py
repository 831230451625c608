"""The one way from a command to stderr. Knows no command."""

from __future__ import annotations

import sys

from pagedbatch.printable import printable


def say(text: str) -> None:
    """Prints a line, in which whatever came from a file, a model or another library can't steer the terminal."""
    print(printable(text), file=sys.stderr)

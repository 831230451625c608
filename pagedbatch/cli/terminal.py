"""How commands write to stderr."""

from __future__ import annotations

import sys

from pagedbatch.printable import printable


def say(text: str) -> None:
    """Prints a line. Text from files, models or other libraries can't control the terminal with it."""
    print(printable(text), file=sys.stderr)

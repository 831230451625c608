"""Lines for the user, from whichever process they come."""

from __future__ import annotations

from collections.abc import Callable


class Notices:
    """A taker of lines that can be replaced after others were given it."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._told: set[str] = set()

    def __call__(self, line: str) -> None:
        self._tell(line)

    def once(self, line: str) -> None:
        """A line that each of several processes may say."""
        if line not in self._told:
            self._told.add(line)
            self._tell(line)

    def tell_with(self, tell: Callable[[str], None]) -> None:
        """From now on `tell` takes the lines."""
        self._tell = tell

"""A page of memory that the preparing process writes and its parent reads, also after the process was ended."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

_PAGE = 4096
_NAME_AT = 2
_SOURCE_AT = 512
_MAX_BYTES = 250


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a row got. `has_rendered`: this process has rendered a chat template to its end."""

    step: str
    source: str
    has_rendered: bool


class Board:
    """Made before the processes that share it."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _PAGE)

    def clear(self) -> None:
        """A new process begins."""
        self._memory[0] = 0
        self.write("", "")

    def write(self, step: str, source: str) -> None:
        """A step begins."""
        for at, text in ((_NAME_AT, step), (_SOURCE_AT, source)):
            encoded = text.encode()[:_MAX_BYTES]
            self._memory[at : at + 1 + len(encoded)] = bytes([len(encoded)]) + encoded

    def write_rendered(self) -> None:
        """A chat template has been rendered to its end."""
        self._memory[0] = 1

    def read(self) -> Progress:
        """What was written last."""
        return Progress(self._text(_NAME_AT), self._text(_SOURCE_AT), bool(self._memory[0]))

    def _text(self, at: int) -> str:
        length = self._memory[at]
        return self._memory[at + 1 : at + 1 + length].decode(errors="replace")

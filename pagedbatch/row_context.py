"""What is kept of a row from its preparation until its record is written. Small, whatever the row held."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RowId = int | str

#: The shape of a row's record: ours, or that of OpenAI's chat or completions endpoint.
ReplyFormat = Literal["plain", "chat", "completion"]


@dataclass(frozen=True, slots=True)
class RowContext:
    """What the record of a row takes from the row itself.

    `place` is where the user finds the row: `line 7`. `kept` is the JSON of the columns to carry into the record; None
    if none were asked for.
    """

    index: int
    id: RowId | None
    place: str
    reply: ReplyFormat
    kept: bytes | None

"""Finds outputs that end in a loop, as translations of unusual sources do."""

from __future__ import annotations

from collections.abc import Sequence

#: Longest piece whose repetition counts as a loop, how often it must stand there, and least tokens that only repeat.
_MAX_PERIOD, _MIN_TIMES, _MIN_TOKENS = 32, 3, 8


def num_repeated_tokens(token_ids: Sequence[int]) -> int:
    """How many tokens at the end only repeat the piece before them; 0 if that is no loop."""
    for period in range(1, min(_MAX_PERIOD, len(token_ids) // _MIN_TIMES) + 1):
        length = 0
        while length + period < len(token_ids) and token_ids[-1 - length] == token_ids[-1 - length - period]:
            length += 1
        if length >= max((_MIN_TIMES - 1) * period, _MIN_TOKENS):
            return length
    return 0

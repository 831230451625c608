"""Which option a key was probably meant to be: one with a typing mistake, or in another style."""

from __future__ import annotations

from functools import lru_cache

from pagedbatch.input.fields.field_table import BUNDLES, KNOWN, OPTIONS, PLACE_FIELDS, PROMPT_FIELDS, SYNONYMS

_LONGEST = 40
#: Shorter names are one letter away from too much.
_SHORTEST = 4
#: Words that data columns are called, and that are no mistakes.
_ORDINARY = frozenset({
    "document", "feed", "message", "min", "need", "reed", "seen", "shop", "speed", "step", "steps", "stoop", "tool",
    "top", "tops", "weed",
})  # fmt: skip


def _folded(name: str) -> str:
    """A name without what styles differ in: `maxTokens`, `max-tokens` and `max_tokens` are one."""
    return "".join(letter for letter in name.lower() if letter not in "-_. ")


_OWN_FIRST = [*sorted(OPTIONS), *PROMPT_FIELDS, *PLACE_FIELDS, "custom_id", *SYNONYMS, *BUNDLES]
_BY_FOLDED = {_folded(name): name for name in reversed(_OWN_FIRST)}


@lru_cache(maxsize=4096)
def nearest_option(name: str) -> str | None:
    """The option that an unknown key was probably meant to be; None: there is none so near."""
    if len(name) > _LONGEST or name in KNOWN or name in _ORDINARY:
        return None
    folded = _folded(name)
    if folded in _BY_FOLDED:
        return _BY_FOLDED[folded]
    if len(folded) < _SHORTEST - 1:
        return None
    return next(
        (
            _BY_FOLDED[_folded(option)]
            for option in _OWN_FIRST
            if len(_folded(option)) >= _SHORTEST and is_one_edit_away(folded, _folded(option))
        ),
        None,
    )


def is_one_edit_away(one: str, other: str) -> bool:
    """Whether a letter added, left out or changed, or two neighbours swapped, makes one text of the other."""
    if abs(len(one) - len(other)) > 1 or one == other:
        return False
    start = 0
    while start < min(len(one), len(other)) and one[start] == other[start]:
        start += 1
    a, b = one[start:], other[start:]
    return a[1:] == b[1:] or a[1:] == b or a == b[1:] or (a[:2] == b[1::-1] and a[2:] == b[2:])

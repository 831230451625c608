"""Text from outside made fit for a terminal: what would steer it, or turn the line around, is shown and not obeyed."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

#: Other, control; half of a surrogate pair; line and paragraph separators.
_UNSAFE_CATEGORIES = frozenset({"Cc", "Cs", "Zl", "Zp"})
#: Invisible too, but part of words and of emojis.
_JOINERS = frozenset("\u200c\u200d")


def printable(text: str, *, kept: str = "") -> str:
    r"""`text` in one line, its control characters and those of writing direction escaped as Python does: `\x1b`.

    `kept` are characters that stay as they are.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        _escaped(character) if _is_unsafe(character) and character not in kept else character for character in text
    )


def printable_values(value: Any) -> Any:
    """JSON data, or dataclasses, with all texts `printable`, keys included; line ends stay, for JSON to escape."""
    if isinstance(value, str):
        return printable(value, kept="\n\t")
    if isinstance(value, Mapping):
        return {printable(str(name)): printable_values(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [printable_values(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: printable_values(getattr(value, field.name)) for field in fields(value)})
    return value


def _is_unsafe(character: str) -> bool:
    category = unicodedata.category(character)
    return category in _UNSAFE_CATEGORIES or (category == "Cf" and character not in _JOINERS)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")

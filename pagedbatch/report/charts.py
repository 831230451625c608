"""Bars and sparklines that can be read without colour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.console import Console
from rich.text import Text


@dataclass(frozen=True, slots=True)
class Glyphs:
    """What bars are drawn with: `shades` from the densest to the lightest, `ticks` from low to high."""

    shades: tuple[str, str, str, str]
    ticks: str
    dot: str


UNICODE = Glyphs(shades=("█", "▓", "▒", "░"), ticks="▁▂▃▄▅▆▇█", dot="·")
ASCII = Glyphs(shades=("#", "=", "-", "."), ticks="_.:-=+*#", dot="|")


def glyphs_for(console: Console) -> Glyphs:
    """Block characters if the console's encoding has them, else ASCII."""
    return ASCII if console.options.ascii_only else UNICODE


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a stacked bar."""

    value: float
    glyph: str
    style: str = ""


def cells(values: Sequence[float], width: int) -> list[int]:
    """Splits `width` cells in proportion to `values`, exactly; if there is room, each value above 0 has a cell.

    Largest remainder: the floor of each share first, then a cell each to those that lost most. A part that still has
    none takes one from the longest.
    """
    total = sum(values)
    if total <= 0:
        return [0] * len(values)
    shares = [value * width / total for value in values]
    counts = [int(share) for share in shares]
    by_loss = sorted(range(len(values)), key=lambda i: counts[i] - shares[i])
    for i in by_loss[: width - sum(counts)]:
        counts[i] += 1
    for i, value in enumerate(values):
        longest = counts.index(max(counts))
        if value > 0 and counts[i] == 0 and counts[longest] > 1:
            counts[longest] -= 1
            counts[i] = 1
    return counts


def stacked_bar(parts: Sequence[Part], width: int) -> Text:
    """The parts side by side over `width` cells; blank when all are zero."""
    text = Text()
    for part, count in zip(parts, cells([part.value for part in parts], width), strict=True):
        text.append(part.glyph * count, part.style)
    text.append(" " * (width - len(text)))
    return text


def sparkline(values: Sequence[float], width: int, glyphs: Glyphs, top: float | None = None) -> str:
    """Values as ticks from 0 to `top` (their maximum if not given), averaged down to at most `width` of them."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [i * len(values) // count for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    top = max(means) if top is None else top
    last = len(glyphs.ticks) - 1
    return "".join(glyphs.ticks[min(last, round(last * mean / top)) if top > 0 else 0] for mean in means)

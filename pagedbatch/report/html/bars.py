"""Drawings that compare: shares of memory as in the paper's figure 2, time by what took it, lengths. Knows the keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from pagedbatch.report.html.canvas import legend
from pagedbatch.report.html.palette import colour
from pagedbatch.stats.baselines import SCHEMES
from pagedbatch.wording import duration

SHARES = ("used", "reserved", "internal", "external")

#: A share narrower than this has no room for its number.
_ROOM_FOR_NUMBER = 0.055
#: Numbers below a histogram, of up to six digits, that stand clear of each other.
_MOST_BORDERS = 8


def draw_shares(axes: Axes, memory: Mapping[str, Any]) -> None:
    """Where KV memory went, this run above the contiguous schemes on the same rows."""
    rows = {"paged, this run": {"used": memory["kv_used"], "internal": 1 - memory["kv_used"]}}
    rows |= {f"contiguous {name}": memory["contiguous"][name] for name in SCHEMES}
    for place, shares in enumerate(rows.values()):
        left = 0.0
        for name in SHARES:
            width = shares.get(name, 0.0)
            axes.barh(place, width, left=left, height=0.62, color=colour(name), linewidth=0)
            if width >= _ROOM_FOR_NUMBER:
                ink = colour("on_used" if name == "used" else "ink")
                weight = "bold" if name == "used" else "normal"
                axes.text(left + width / 2, place, f"{width:.0%}", ha="center", va="center", color=ink, weight=weight)
            left += width
    _named_rows(axes, list(rows))
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.spines["bottom"].set_visible(False)
    legend(axes, [(name, name) for name in SHARES])


def draw_time(axes: Axes, time: Mapping[str, float]) -> None:
    total = sum(time.values())
    names = list(time)
    axes.barh(range(len(names)), [seconds / total for seconds in time.values()], height=0.62, color=colour("private"))
    longest = max(time.values()) / total
    for place, seconds in enumerate(time.values()):
        axes.text(seconds / total + 0.012 * longest, place, f"{seconds / total:.1%}, {duration(seconds)}", va="center")
    _named_rows(axes, names)
    axes.set_xlim(0, 1.3 * longest)
    axes.xaxis.set_visible(False)
    axes.spines["bottom"].set_visible(False)


def draw_lengths(axes: Axes, counts: Mapping[str, Any], noun: str) -> None:
    """How many texts are so long, by powers of two, and their mean."""
    histogram = counts["histogram"]
    first, last = histogram[0][1].bit_length(), histogram[-1][1].bit_length()
    by_bucket = {high.bit_length(): count for _, high, count in histogram}
    buckets = range(first, last + 1)
    heights = [by_bucket.get(bucket, 0) for bucket in buckets]
    axes.bar([bucket + 0.5 for bucket in buckets], heights, width=0.92, color=colour("private"))
    borders = range(first, last + 2)[:: 1 + len(buckets) // _MOST_BORDERS]
    axes.set_xticks(list(borders), [f"{1 << border >> 1:,}" for border in borders])
    axes.set_xlim(first - 0.3, last + 1.3)
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.grid(axis="y")
    axes.set_xlabel("tokens")
    axes.set_ylabel(noun)
    axes.set_title(f"{counts['min']:,} to {counts['max']:,}, mean {counts['mean']:,.0f}", loc="left", fontsize=9)


def _named_rows(axes: Axes, names: list[str]) -> None:
    """The first on top, names in ink, no line at the left."""
    axes.set_yticks(range(len(names)), names, color=colour("ink"))
    axes.invert_yaxis()
    axes.spines["left"].set_visible(False)

"""The figures of the page, in order: each with a title, what it shows in plain words, and how it is drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator, PercentFormatter

from pagedbatch.outputs import BLOCK_STATES
from pagedbatch.report.html import block_map
from pagedbatch.report.html.canvas import legend, picture
from pagedbatch.report.html.palette import colour
from pagedbatch.report.wording import kv_shares
from pagedbatch.stats.schema import KV_SHARES, LengthCounts, Memory, Stats, Time, TimelinePoint
from pagedbatch.wording import duration

#: A share narrower than this has no room for its number.
_ROOM_FOR_NUMBER = 0.055
#: Numbers below a histogram, of up to six digits, that don't touch each other.
_MAX_BORDERS = 8


@dataclass(frozen=True, slots=True)
class FigureOfRun:
    """`draw` makes the `<svg>` of a run at a width in inches; None where the run has no figures for it."""

    title: str
    words: str
    draw: Callable[[Stats, float], str | None]


def _pool(stats: Stats, width: float) -> str | None:
    if stats.memory is None or not stats.timeline:
        return None
    draws = [partial(draw_pool, timeline=stats.timeline, num_blocks=stats.memory.num_blocks)]
    return picture(draws, width, 3.1, "Blocks of the pool by state over time")


def _shares(stats: Stats, width: float) -> str | None:
    if stats.memory is None or not kv_shares(stats.memory):
        return None
    draws = [partial(draw_shares, memory=stats.memory)]
    return picture(draws, width, 2.3, "Shares of KV memory, paged and contiguous")


def _map(stats: Stats, width: float) -> str | None:
    peak_map = None if stats.memory is None else stats.memory.peak_map
    if peak_map is None or not any(each.runs for each in peak_map.held):
        return None
    height = block_map.map_height(peak_map)
    draws = [partial(block_map.draw_map, peak_map=peak_map)]
    return picture(draws, width, height, "Who held which blocks at the fullest step")


def _saving(stats: Stats, width: float) -> str | None:
    if stats.memory is None or stats.memory.kv_used is None or not stats.timeline:
        return None
    draws = [partial(draw_saving, timeline=stats.timeline, block_size=stats.memory.block_size)]
    return picture(draws, width, 2.6, "Sharing saving and KV used over time")


def _time(stats: Stats, width: float) -> str | None:
    if not stats.time.total:
        return None
    return picture([partial(draw_time, time=stats.time)], width, 1.9, "Where time went")


def _lengths(stats: Stats, width: float) -> str | None:
    if stats.lengths is None:
        return None
    counted = (("prompts", stats.lengths.prompt), ("outputs", stats.lengths.output))
    draws = [partial(draw_lengths, counts=counts, noun=noun) for noun, counts in counted if counts.count]
    return picture(draws, width, 2.5, "Lengths of prompts and outputs in tokens") if draws else None


def draw_shares(axes: Axes, memory: Memory) -> None:
    """Where KV memory went, this run above the contiguous schemes on the same rows."""
    bars = kv_shares(memory)
    for place, shares in enumerate(bars.values()):
        left = 0.0
        for name in KV_SHARES:
            width = shares[name]
            axes.barh(place, width, left=left, height=0.62, color=colour(name), linewidth=0)
            if width >= _ROOM_FOR_NUMBER:
                ink = colour("on_used" if name == "used" else "ink")
                weight = "bold" if name == "used" else "normal"
                axes.text(left + width / 2, place, f"{width:.0%}", ha="center", va="center", color=ink, weight=weight)
            left += width
    _named_bars(axes, list(bars))
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.spines["bottom"].set_visible(False)
    legend(axes, [(name, name) for name in KV_SHARES])


def draw_time(axes: Axes, time: Time) -> None:
    shares = {name: seconds / time.total for name, seconds in time.parts().items()}
    axes.barh(range(len(shares)), list(shares.values()), height=0.62, color=colour("private"))
    longest = max(shares.values())
    for place, share in enumerate(shares.values()):
        axes.text(share + 0.012 * longest, place, f"{share:.1%}, {duration(share * time.total)}", va="center")
    _named_bars(axes, list(shares))
    axes.set_xlim(0, 1.3 * longest)
    axes.xaxis.set_visible(False)
    axes.spines["bottom"].set_visible(False)


def draw_lengths(axes: Axes, counts: LengthCounts, noun: str) -> None:
    """How many texts have which length, by powers of two, and their mean."""
    histogram = counts.histogram
    first, last = histogram[0][1].bit_length(), histogram[-1][1].bit_length()
    by_bucket = {high.bit_length(): count for _, high, count in histogram}
    buckets = range(first, last + 1)
    heights = [by_bucket.get(bucket, 0) for bucket in buckets]
    axes.bar([bucket + 0.5 for bucket in buckets], heights, width=0.92, color=colour("private"))
    borders = range(first, last + 2)[:: 1 + len(buckets) // _MAX_BORDERS]
    axes.set_xticks(list(borders), [f"{1 << border >> 1:,}" for border in borders])
    axes.set_xlim(first - 0.3, last + 1.3)
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.grid(axis="y")
    axes.set_xlabel("tokens")
    axes.set_ylabel(noun)
    axes.set_title(f"{counts.min:,} to {counts.max:,}, mean {counts.mean:,.0f}", loc="left", fontsize=9)


def _named_bars(axes: Axes, names: list[str]) -> None:
    """The first on top, names in ink, no line at the left."""
    axes.set_yticks(range(len(names)), names, color=colour("ink"))
    axes.invert_yaxis()
    axes.spines["left"].set_visible(False)


def draw_pool(axes: Axes, timeline: Sequence[TimelinePoint], num_blocks: int) -> None:
    """Blocks by state as a stack. A pool that is mostly free is cut above what was taken, and says so."""
    edges = _edges(timeline)
    floor = [0.0] * len(timeline)
    taken = max(num_blocks - point.free for point in timeline)
    cut = taken < num_blocks / 2
    top = max(1.0, 1.25 * taken) if cut else num_blocks
    for state in BLOCK_STATES:
        ceiling = [min(top, low + getattr(point, state)) for low, point in zip(floor, timeline, strict=True)]
        axes.fill_between(edges, _stepped(floor), _stepped(ceiling), step="post", facecolor=colour(state), linewidth=0)
        floor = ceiling
    _time_axis(axes, edges)
    axes.set_ylim(0, top)
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_ylabel("blocks")
    if cut:
        axes.text(
            0.99, 0.95, f"free goes on up to {num_blocks:,} blocks", transform=axes.transAxes, ha="right", va="top",
            color=colour("muted"), fontsize=8.5,
        )  # fmt: skip
    legend(axes, [(state, state) for state in BLOCK_STATES])


def draw_saving(axes: Axes, timeline: Sequence[TimelinePoint], block_size: int) -> None:
    """Sharing saving and KV used, as shares, where a point had live blocks."""
    edges = _edges(timeline)
    saving = [point.sharing_saving for point in timeline]
    used = [point.kv_used(block_size) for point in timeline]
    axes.fill_between(edges, _stepped(saving), step="post", facecolor=colour("shared"), alpha=0.85, linewidth=0)
    axes.step(edges, _stepped(used), where="post", color=colour("used"), linewidth=1.6)
    _time_axis(axes, edges)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.grid(axis="y")
    legend(axes, [("blocks saved by sharing", "shared"), ("KV used: slots that hold tokens", "used")])


def _edges(timeline: Sequence[TimelinePoint]) -> list[float]:
    """Where each point begins, in seconds, and where the last one ends."""
    return [0.0, *(point.seconds for point in timeline)]


def _stepped(values: Sequence[float]) -> list[float]:
    """The values, and the last one again: it holds up to the last edge."""
    return [*values, values[-1]]


def _time_axis(axes: Axes, edges: Sequence[float]) -> None:
    unit, name = (1, "seconds") if edges[-1] < 180 else (60, "minutes") if edges[-1] < 3 * 3600 else (3600, "hours")
    axes.set_xlim(0, max(edges[-1], 1e-3))
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 3, 5, 6, 10]) if unit == 1 else _every(edges[-1], unit))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / unit:,.3g}"))
    axes.set_xlabel(name)


def _every(end: float, unit: int) -> MultipleLocator:
    """About eight marks at whole steps of the unit."""
    step = next((s for s in (1, 2, 5, 10, 15, 30, 60, 120) if end / (s * unit) <= 8), 240)
    return MultipleLocator(step * unit)


FIGURES = (
    FigureOfRun(
        "The pool over time",
        "Every block of the pool is in one of four states. Private blocks belong to one sequence, shared ones to two "
        "or more; cached blocks have lost their last owner, and what they hold can still be used again.",
        _pool,
    ),
    FigureOfRun(
        "Where KV memory goes",
        "Of the memory that was taken: used holds a token, reserved will hold one before its sequence ends, internal "
        "is reserved and never will, external is lost between reservations. The contiguous bars replay this run's own "
        "sequences, each in one region as large as its limit (max), as its output rounded up to a power of two "
        "(pow2), or exactly as it needs (oracle).",
        _shares,
    ),
    FigureOfRun(
        "Who shares what",
        "The fullest step, or one within a tenth of it. A line is a sequence and each box a block of it, from the "
        "beginning of the prompt to the right; a box that spans several lines is one block that these sequences share. "
        "The stronger its colour, the more owners it has.",
        _map,
    ),
    FigureOfRun(
        "What sharing saved",
        "Blocks saved, of those that all sequences name: without sharing each would hold its own copy. And the share "
        "of slots in live blocks that hold a token; the rest is the unfilled end of each sequence's last block.",
        _saving,
    ),
    FigureOfRun(
        "Where time went",
        "Seconds of the run. Model is the forward pass without attention; host is scheduling and bookkeeping; io is "
        "reading rows and writing records.",
        _time,
    ),
    FigureOfRun("How long prompts and outputs were", "How many there are of each length, by powers of two.", _lengths),
)

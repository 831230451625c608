"""The figures of the page, in order: each with a title, what it shows in plain words, and its picture of a run.

Knows the keys of OUT.stats.json; knows no HTML but the SVG that comes from the canvas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from pagedbatch.report.html import bars, block_map, over_time
from pagedbatch.report.html.canvas import picture
from pagedbatch.stats.baselines import SCHEMES

Stats = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class FigureOfRun:
    """`draw` makes the `<svg>` of a run at a width in inches; None where the run has no figures for it."""

    title: str
    words: str
    draw: Callable[[Stats, float], str | None]


def _pool(stats: Stats, width: float) -> str | None:
    timeline = stats["timeline"]
    if not timeline:
        return None
    draws = [partial(over_time.draw_pool, timeline=timeline, num_blocks=stats["memory"]["num_blocks"])]
    return picture(draws, width, 3.1, "Blocks of the pool by state over time")


def _shares(stats: Stats, width: float) -> str | None:
    memory = stats["memory"]
    schemes = [memory["contiguous"][name] for name in SCHEMES]
    if memory["kv_used"] is None or not any(scheme["replayed"] or scheme["refused"] for scheme in schemes):
        return None
    draws = [partial(bars.draw_shares, memory=memory)]
    return picture(draws, width, 2.3, "Shares of KV memory, paged and contiguous")


def _map(stats: Stats, width: float) -> str | None:
    peak_map = stats["memory"].get("peak_map")
    if not peak_map or not any(each["runs"] for each in peak_map["held"]):
        return None
    height = block_map.map_height(peak_map)
    draws = [partial(block_map.draw_map, peak_map=peak_map)]
    return picture(draws, width, height, "Who held which blocks at the fullest step")


def _saving(stats: Stats, width: float) -> str | None:
    timeline, block_size = stats["timeline"], stats["memory"]["block_size"]
    if stats["memory"]["kv_used"] is None or not timeline:
        return None
    draws = [partial(over_time.draw_saving, timeline=timeline, block_size=block_size)]
    return picture(draws, width, 2.6, "Sharing saving and KV used over time")


def _time(stats: Stats, width: float) -> str | None:
    time = stats["time"]
    if sum(time.values()) <= 0:
        return None
    draws = [partial(bars.draw_time, time=time)]
    return picture(draws, width, 1.9, "Where time went")


def _lengths(stats: Stats, width: float) -> str | None:
    lengths = stats.get("lengths", {})
    known = [(kind, lengths[kind]) for kind in ("prompt", "output") if kind in lengths and lengths[kind]["count"]]
    if not known:
        return None
    draws = [partial(bars.draw_lengths, counts=counts, noun=f"{kind}s") for kind, counts in known]
    return picture(draws, width, 2.5, "Lengths of prompts and outputs in tokens")


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
    FigureOfRun("How long prompts and outputs were", "How many have so many tokens, by powers of two.", _lengths),
)

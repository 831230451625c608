"""Drawings over the run's time: the pool's blocks by state, and what sharing saved. Knows the keys of the timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator, PercentFormatter

from pagedbatch.report.html.canvas import legend
from pagedbatch.report.html.palette import colour

Point = Mapping[str, Any]

STATES = ("private", "shared", "cached", "free")


def draw_pool(axes: Axes, timeline: Sequence[Point], num_blocks: int) -> None:
    """Blocks by state as a stack. A pool that is mostly free is cut above what was taken, and says so."""
    edges = _edges(timeline)
    floor = [0.0] * len(timeline)
    taken = max(num_blocks - point["free"] for point in timeline)
    cut = taken < num_blocks / 2
    top = max(1.0, 1.25 * taken) if cut else num_blocks
    for state in STATES:
        ceiling = [min(top, low + point[state]) for low, point in zip(floor, timeline, strict=True)]
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
    legend(axes, [(state, state) for state in STATES])


def draw_saving(axes: Axes, timeline: Sequence[Point], block_size: int) -> None:
    """Sharing saving and KV used, as shares, where a point had live blocks."""
    edges = _edges(timeline)
    live = [point["private"] + point["shared"] for point in timeline]
    saving = [1 - blocks / point["logical"] if blocks else 0.0 for point, blocks in zip(timeline, live, strict=True)]
    used = [
        point["filled_slots"] / (blocks * block_size) if blocks else 0.0
        for point, blocks in zip(timeline, live, strict=True)
    ]
    axes.fill_between(edges, _stepped(saving), step="post", facecolor=colour("shared"), alpha=0.85, linewidth=0)
    axes.step(edges, _stepped(used), where="post", color=colour("used"), linewidth=1.6)
    _time_axis(axes, edges)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.grid(axis="y")
    legend(axes, [("blocks saved by sharing", "shared"), ("KV used: slots that hold tokens", "used")])


def _edges(timeline: Sequence[Point]) -> list[float]:
    """Where each point begins, in seconds, and where the last one ends."""
    return [0.0, *(point["seconds"] for point in timeline)]


def _stepped(values: Sequence[float]) -> list[float]:
    """A value a point, and the last one again: it holds up to the last edge."""
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

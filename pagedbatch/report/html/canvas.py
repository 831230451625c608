"""What every figure shares: fonts and axes before it is drawn, clean SVG after."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from io import StringIO
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path as Outline

from pagedbatch.report.html.palette import colour, with_variables

#: Text stays text; nothing in the bytes depends on the moment or the machine.
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "pagedbatch",
    "text.parse_math": False,
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": colour("ink"),
    "axes.edgecolor": colour("grid"),
    "axes.labelcolor": colour("muted"),
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": colour("grid"),
    "grid.linewidth": 0.7,
    "xtick.color": colour("muted"),
    "ytick.color": colour("muted"),
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
}  # fmt: skip
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


def picture(draws: Sequence[Callable[[Axes], None]], width: float, height: float, label: str) -> str:
    """Drawings side by side on `width` x `height` inches, as an `<svg>` element that takes its colours from the page.

    `label` is what a screen reader says; it is no markup.
    """
    with mpl.rc_context(_SETTINGS):
        figure = Figure(figsize=(width, height), layout="constrained")
        for place, draw in enumerate(draws, start=1):
            draw(figure.add_subplot(1, len(draws), place))
        svg = with_variables(to_svg(figure))
    return svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)


def composed(draw: Callable[[Figure], None], width: float, height: float) -> str:
    """A picture of several drawings, still in placeholder colours."""
    with mpl.rc_context(_SETTINGS):
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(figure)
        return to_svg(figure)


def to_svg(figure: Figure) -> str:
    """The `<svg>` element alone: no prologue, no metadata, no fonts by name, no ids but those referred to."""
    figure.patch.set_visible(False)
    text = StringIO()
    figure.savefig(text, format="svg", metadata=_NO_METADATA)
    svg = text.getvalue()
    svg = svg[svg.index("<svg ") :]
    svg = re.sub(r' (?:width|height)="[0-9.]+pt"', "", svg, count=2)
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg)
    svg = re.sub(r"font: (?:([a-z0-9]+) )?([0-9.]+px) [^;\"]*", r"font-size: \2", svg)
    svg = re.sub(r"(\d\.\d\d)\d+", r"\1", svg)  # a hundredth of a point is finer than any screen
    svg = re.sub(r' transform="rotate\(-0 [^"]*"', "", svg)
    referred = set(re.findall(r"#([\w.-]+)[\")]", svg))
    svg = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in referred else "", svg)
    return re.sub(r"\n\s*", " ", svg).strip() + "\n"


def legend(axes: Axes, entries: Sequence[tuple[str, str]], columns: int | None = None) -> None:
    """Names and colours in a line above the drawing."""
    handles = [Rectangle((0, 0), 1, 1, facecolor=colour(name), label=label) for label, name in entries]
    axes.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=columns or len(entries), frameon=False,
        borderaxespad=0.3, borderpad=0.2, handlelength=1.0, handleheight=1.0, columnspacing=1.4, handletextpad=0.5,
    )  # fmt: skip


def boxes(axes: Axes, rectangles: Sequence[tuple[float, float, float, float]], name: str) -> None:
    """Rectangles (left, top, right, bottom) of one colour, as one outline: thousands stay one element."""
    if not rectangles:
        return
    corners: list[tuple[float, float]] = []
    for left, top, right, bottom in rectangles:
        corners += [(left, top), (right, top), (right, bottom), (left, bottom), (left, top)]
    codes = [Outline.MOVETO, Outline.LINETO, Outline.LINETO, Outline.LINETO, Outline.CLOSEPOLY] * len(rectangles)
    axes.add_patch(PathPatch(Outline(corners, codes), facecolor=colour(name), linewidth=0))

"""The block map: each running sequence's table as a line, blocks with several owners as one tall box."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from pagedbatch.report.html.canvas import boxes, legend
from pagedbatch.report.html.palette import colour
from pagedbatch.stats.schema import PeakMap

#: Between the lines of one row, and between rows, in lines.
_GAP = 0.08
_ROW_GAP = 0.55
#: Blocks in a line up to which they are drawn apart; more would be thinner than the lines between them.
_MAX_BLOCKS_APART = 128

_OWNERS = (("1 owner", "private"), ("2 to 3", "few"), ("4 to 7", "several"), ("8 or more", "many"))


@dataclass(frozen=True, slots=True)
class Line:
    """A sequence's block table: block numbers, -1 where dropped. It is drawn from `top` over a height of 1."""

    row: int
    blocks: list[int]
    top: float


def lines_of(peak_map: PeakMap) -> list[Line]:
    """Rows in serving order; within a row, sequences that share more are closer."""
    lines: list[Line] = []
    top = 0.0
    for row, held in groupby(peak_map.held, key=lambda each: each.row):
        tables = [
            [-1 if first < 0 else first + i for first, length in each.runs for i in range(length)] for each in held
        ]
        for blocks in sorted(tables):
            lines.append(Line(row, blocks, top))
            top += 1
        top += _ROW_GAP
    return lines


def map_height(peak_map: PeakMap) -> float:
    """Height of the map in inches."""
    lines = lines_of(peak_map)
    return 0.9 + min(0.115, 6 / len(lines)) * (lines[-1].top + 1)


def draw_map(axes: Axes, peak_map: PeakMap) -> None:
    lines = lines_of(peak_map)
    owners = Counter(number for line in lines for number in line.blocks)
    by_colour: dict[str, list[tuple[float, float, float, float]]] = {name: [] for _, name in _OWNERS}
    for left, right, top, bottom, number in _merged(lines):
        by_colour[_colour_of(owners[number])].append((left, top, right, bottom))
    for name, rectangles in by_colour.items():
        boxes(axes, rectangles, name)
    width = max(len(line.blocks) for line in lines)
    bottom = lines[-1].top + 1
    if width <= _MAX_BLOCKS_APART:
        axes.vlines(range(1, width), 0, bottom, color=colour("paper"), linewidth=min(0.8, 40 / width))
    axes.set_xlim(0, width)
    axes.set_ylim(bottom, 0)
    axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    axes.set_xlabel(_axis_words(peak_map, width))
    axes.spines[["left", "bottom"]].set_visible(False)
    places = _row_places(lines)
    every = -(-len(places) // 20)
    axes.set_yticks([middle for _, middle in places[::every]], [f"row {row}" for row, _ in places[::every]])
    legend(axes, _OWNERS)


def _axis_words(peak_map: PeakMap, width: int) -> str:
    """The label of the axis, and what the map leaves out."""
    words = "blocks of a sequence, in order"
    shown, there = len(peak_map.held), peak_map.num_sequences
    longest = max(each.num_blocks for each in peak_map.held)
    if longest > width:
        words = f"the first {width:,} {words}"
    return words if shown == there else f"{words} (the first {shown:,} of {there:,} sequences)"


def _colour_of(owners: int) -> str:
    return "private" if owners < 2 else "few" if owners < 4 else "several" if owners < 8 else "many"


def _row_places(lines: Sequence[Line]) -> list[tuple[int, float]]:
    """Each row and the middle of its lines."""
    rows = [list(own) for _, own in groupby(lines, key=lambda line: line.row)]
    return [(own[0].row, (own[0].top + own[-1].top + 1) / 2) for own in rows]


def _merged(lines: Sequence[Line]) -> Iterator[tuple[float, float, float, float, int]]:
    """Boxes (left, right, top, bottom, a block's number): one for all adjacent lines that share a block, and one for
    adjacent blocks with the same owners."""
    finished: list[tuple[float, float, float, float, int]] = []
    open_boxes: dict[tuple[float, float], tuple[int, int]] = {}  # top, bottom -> first place, number
    owners = Counter(number for line in lines for number in line.blocks)
    width = max(len(line.blocks) for line in lines)
    for place in range(width + 1):
        spans = dict(_spans(lines, place))
        for span, (first, number) in list(open_boxes.items()):
            if span not in spans or _colour_of(owners[spans[span]]) != _colour_of(owners[number]):
                finished.append((first, place, *span, number))
                del open_boxes[span]
        for span, number in spans.items():
            open_boxes.setdefault(span, (place, number))
    yield from finished


def _spans(lines: Sequence[Line], place: int) -> Iterator[tuple[tuple[float, float], int]]:
    """The blocks at one place of the tables: (top, bottom) and number, each for the adjacent lines that share it."""
    there = ((line, line.blocks[place] if place < len(line.blocks) else -1) for line in lines)
    for number, own in groupby(there, key=lambda each: each[1]):
        if number >= 0:
            members = [line for line, _ in own]
            yield (members[0].top + _GAP, members[-1].top + 1 - _GAP), number

"""The README's picture, from the stats of a run: `python docs/make_picture.py OUT.stats.json picture.svg`.

It stands alone, on its own white paper, so that it reads the same under a dark page.
"""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib.figure import Figure

from pagedbatch.output.stats_file import read_stats
from pagedbatch.report.html.block_map import draw_map
from pagedbatch.report.html.canvas import composed
from pagedbatch.report.html.figures import draw_pool, draw_shares
from pagedbatch.report.html.palette import COLOURS, with_light_colours
from pagedbatch.stats.schema import Stats

_FONTS = "system-ui,-apple-system,'Segoe UI',Helvetica,Arial,'DejaVu Sans',sans-serif"


def draw(figure: Figure, stats: Stats) -> None:
    memory = stats.memory
    figure.get_layout_engine().set(rect=(0.012, 0.015, 0.972, 0.965), h_pad=0.09)
    axes = figure.subplot_mosaic("AB\nCC", height_ratios=(1.5, 1), width_ratios=(1.15, 1))
    draw_pool(axes["A"], stats.timeline, memory.num_blocks)
    draw_map(axes["B"], memory.peak_map)
    draw_shares(axes["C"], memory)
    titles = {"A": "The pool over time", "B": "Who shares what, at the peak", "C": "Where KV memory goes"}
    for place, title in titles.items():
        axes[place].set_title(title, loc="left", pad=24, fontsize=11, weight="bold")


def main(stats_file: str, picture: str) -> None:
    stats = read_stats(Path(stats_file))
    svg = with_light_colours(composed(lambda figure: draw(figure, stats), 9.4, 6.2))
    paper = f'<rect width="100%" height="100%" rx="8" fill="{COLOURS["paper"].light}"/>'
    head, _, rest = svg.partition(">")
    Path(picture).write_text(f"{head}><style>text{{font-family:{_FONTS}}}</style>{paper}{rest}", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])

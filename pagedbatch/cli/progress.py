"""The live view of a run: rows, speed, time left and the pool.

On a terminal it redraws in place four times a second; elsewhere it prints a plain line every ten seconds.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from pagedbatch.cli.tally import Tally
from pagedbatch.outputs import BLOCK_STATES, PoolCounts, StepSnapshot
from pagedbatch.report.charts import Part, glyphs_for, stacked_bar
from pagedbatch.wording import duration, plural

Clock = Callable[[], float]

REDRAW_SECONDS = 0.25
PLAIN_SECONDS = 10.0

_LABEL_WIDTH = 9
_BESIDE_BAR_WIDTH = 30
_MAX_WIDTH = 120
_MAX_POOLS = 8
_STATE_STYLES = ("blue", "magenta", "cyan", "bright_black")


class Progress(ABC):
    """Shows a run while it lasts. A context manager: entering shows it, leaving shows the final state."""

    def __init__(self, tally: Tally, console: Console, clock: Clock, seconds: float) -> None:
        self._tally = tally
        self._console = console
        self._clock = clock
        self._seconds = seconds
        self._due = 0.0

    @abstractmethod
    def __enter__(self) -> Self: ...

    @abstractmethod
    def __exit__(self, *exception: object) -> None: ...

    def update(
        self, snapshot: StepSnapshot | None, rows_done: int, rows_error: int, pools: Sequence[StepSnapshot] = ()
    ) -> None:
        """Called after each step. With several workers, `snapshot` is their sum and `pools` are their own snapshots.

        `rows_done` counts the rows that this run finished, errors included, and `rows_error` the errors among them.
        Neither includes resumed rows. `snapshot` is None if rows failed before the first step.
        """
        now = self._clock()
        self._tally.take(now, snapshot, rows_done, rows_error)
        if now >= self._due:
            self._due = now + self._seconds
            self._tally.mark()
            self._show(pools)

    @abstractmethod
    def _show(self, pools: Sequence[StepSnapshot]) -> None: ...


def make_progress(total_rows: int, resumed: int, console: Console, clock: Clock = time.monotonic) -> Progress:
    """The display that suits the console. `total_rows` counts all rows of the input, including the `resumed` ones."""
    tally = Tally(total_rows, resumed)
    if console.is_terminal and not console.is_dumb_terminal:
        return TerminalProgress(tally, console, clock)
    return PlainProgress(tally, console, clock)


class PlainProgress(Progress):
    """One line every ten seconds and one at the end, for logs."""

    def __init__(self, tally: Tally, console: Console, clock: Clock) -> None:
        super().__init__(tally, console, clock, PLAIN_SECONDS)

    def __enter__(self) -> Self:
        self._due = self._clock() + PLAIN_SECONDS
        return self

    def __exit__(self, *exception: object) -> None:
        self._say(_final_words(self._tally))

    def _show(self, pools: Sequence[StepSnapshot]) -> None:
        self._say(_speed_words(self._tally), _pool_words(self._tally, pools))

    def _say(self, *groups: list[str]) -> None:
        parts = [", ".join(filter(None, words)) for words in groups]
        text = "; ".join(filter(None, [_row_words(self._tally), *parts]))
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class TerminalProgress(Progress):
    """A few lines that are redrawn in place, by `update` when a redraw is due: no thread runs beside the engine."""

    def __init__(self, tally: Tally, console: Console, clock: Clock) -> None:
        super().__init__(tally, console, clock, REDRAW_SECONDS)
        self._glyphs = glyphs_for(console)
        # stdout may carry data and is left alone; warnings on stderr appear above the display.
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=False)

    def __enter__(self) -> Self:
        self._live.start()
        self._show([])
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.update(Group(self._rows_line(), self._cells_line("speed", _final_words(self._tally))))
        self._live.stop()  # draws it

    def _show(self, pools: Sequence[StepSnapshot]) -> None:
        lines = [self._rows_line(), self._cells_line("speed", _speed_words(self._tally))]
        if self._tally.snapshot is not None:
            lines += self._pool_lines(self._tally.snapshot, pools)
        self._live.update(Group(*lines), refresh=True)

    def _rows_line(self) -> Text:
        tally = self._tally
        full, _, _, empty = self._glyphs.shades
        parts = [Part(tally.rows_done, full, "green"), Part(tally.total_rows - tally.rows_done, empty, "bright_black")]
        return self._bar_line("rows", parts, _share_done(tally), f"{tally.rows_done:,} of {tally.total_rows:,}")

    def _pool_lines(self, snapshot: StepSnapshot, pools: Sequence[StepSnapshot]) -> list[Text]:
        """A line for each pool, up to `_MAX_POOLS`; then what the shades mean, and what is running."""
        if len(pools) < 2:
            bars = [self._pool_line("pool", snapshot.pool)]
        else:
            shown = pools[: _MAX_POOLS - 1] if len(pools) > _MAX_POOLS else pools
            bars = [self._pool_line(f"pool {i}", each.pool) for i, each in enumerate(shown)]
            if len(shown) < len(pools):
                bars.append(self._pool_line(f"all {len(pools)}", snapshot.pool))
        legend = [
            Text.assemble((part.glyph, part.style), f" {name} {part.value:,}")
            for part, name in zip(self._pool_parts(snapshot.pool), BLOCK_STATES, strict=True)
        ]
        words = _running_words(snapshot, self._tally.preemptions)
        return [*bars, self._cells_line("", legend), self._cells_line("running", words)]

    def _pool_line(self, label: str, pool: PoolCounts) -> Text:
        blocks = pool.live + pool.cached + pool.free
        share = pool.live / blocks if blocks else 0.0
        return self._bar_line(label, self._pool_parts(pool), share, f"live of {blocks:,} blocks")

    def _pool_parts(self, pool: PoolCounts) -> list[Part]:
        counts = pool.by_state.values()
        return [Part(*each) for each in zip(counts, self._glyphs.shades, _STATE_STYLES, strict=True)]

    def _line(self, label: str, body: Text) -> Text:
        return Text.assemble((f"{label:<{_LABEL_WIDTH}}", "bold"), body, no_wrap=True, overflow="crop")

    def _bar_line(self, label: str, parts: list[Part], share: float, words: str) -> Text:
        """A bar whose length does not depend on the numbers beside it, so that bars above each other align."""
        width = max(8, self._width - _LABEL_WIDTH - _BESIDE_BAR_WIDTH)
        return self._line(label, stacked_bar(parts, width) + Text(f"  {share:>4.0%}  {words}"))

    def _cells_line(self, label: str, cells: Sequence[str | Text]) -> Text:
        """Words in four columns, which stay in place while numbers grow."""
        width = (self._width - _LABEL_WIDTH) // len(BLOCK_STATES)
        body = Text()
        for cell in cells:
            body.append_text(Text(cell) if isinstance(cell, str) else cell)
            body.append(" " * max(1, width - len(cell)))
        body.rstrip()
        return self._line(label, body)

    @property
    def _width(self) -> int:
        return min(self._console.width, _MAX_WIDTH)


def _share_done(tally: Tally) -> float:
    """Finished rows / all rows, rounded down so that 100% means all."""
    if not tally.total_rows:
        return 1.0
    return int(100 * tally.rows_done / tally.total_rows) / 100


def _row_words(tally: Tally) -> str:
    return f"{tally.rows_done:,} of {plural(tally.total_rows, 'row')} ({_share_done(tally):.0%})"


def _error_words(tally: Tally) -> list[str]:
    return [plural(tally.rows_error, "error")] if tally.rows_error else []


def _speed_words(tally: Tally) -> list[str]:
    if tally.snapshot is None:
        return ["starting", *_error_words(tally)]
    left = tally.seconds_left
    words = [f"{tally.recent_rate:,.0f} tokens/s", plural(tally.output_tokens, "token")]
    return [*words, "" if left is None else f"{_rough(left)} left", *_error_words(tally)]


def _final_words(tally: Tally) -> list[str]:
    if tally.snapshot is None:
        return _error_words(tally)
    words = [f"{tally.mean_rate:,.0f} tokens/s", plural(tally.output_tokens, "token"), duration(tally.elapsed)]
    return [*words, *_error_words(tally)]


def _pool_words(tally: Tally, pools: Sequence[StepSnapshot]) -> list[str]:
    if tally.snapshot is None:
        return []
    live = [f"{each.pool.live:,}" for each in pools]
    return [
        "blocks: " + ", ".join(f"{count:,} {state}" for state, count in tally.snapshot.pool.by_state.items()),
        f"live in each pool: {' '.join(live)}" if len(live) > 1 else "",
        *_running_words(tally.snapshot, tally.preemptions),
    ]


def _running_words(snapshot: StepSnapshot, preemptions: int) -> list[str]:
    return [
        plural(snapshot.running_sequences, "sequence"),
        plural(snapshot.running_groups, "row"),
        f"{snapshot.waiting_groups:,} waiting",
        f"{preemptions:,} preempted",
    ]


def _rough(seconds: float) -> str:
    """Time left, rounded to what is known: to 5 s below two minutes, to 30 s below 20, then to the minute."""
    grain = 1 if seconds < 20 else 5 if seconds < 120 else 30 if seconds < 1200 else 60
    return duration(max(1, round(seconds / grain)) * grain) if seconds >= 10 else f"{max(1, round(seconds))} s"

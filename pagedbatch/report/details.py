"""The long report, below the short one: where contiguous memory went, the run over time, lengths, time, settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pagedbatch.report.breakdown import print_breakdown
from pagedbatch.report.charts import ASCII, Glyphs, Part, glyphs_for, sparkline, stacked_bar
from pagedbatch.report.summary import CHART_BAR_WIDTH, CHART_LABEL_WIDTH
from pagedbatch.report.wording import kv_shares, ordered_settings
from pagedbatch.stats.schema import KV_SHARES, Lengths, Memory, Stats, Time, TimelinePoint
from pagedbatch.wording import duration, percent, plural, size

_SHARE_STYLES = ("green", "blue", "yellow", "bright_black")


def details(stats: Stats, console: Console) -> None:
    """Prints everything that the summary leaves out; sections without figures are not shown."""
    glyphs = glyphs_for(console)
    for title, lines in _sections(stats, glyphs):
        first = next(lines, None)
        if first is None:
            continue
        console.print(Text(f"\n{title}", style="bold"))
        for line in (first, *lines):
            console.print(line, no_wrap=True, overflow="crop")
    print_breakdown(stats, console)
    _print_settings(stats, console, ascii_only=glyphs is ASCII)
    if stats.versions:
        versions = ", ".join(f"{name} {version}" for name, version in stats.versions.items())
        console.print(Text.assemble(("\nVersions\n", "bold"), versions))


def _sections(stats: Stats, glyphs: Glyphs) -> Iterator[tuple[str, Iterator[Text]]]:
    """Titles and lines. Merged shards whose blocks differ in size have no memory in common."""
    if stats.memory is not None:
        yield "Where KV memory goes", _shares(stats.memory, glyphs)
        yield "Over the run", _over_time(stats.timeline, stats.memory.block_size, glyphs)
    if stats.lengths is not None:
        yield "Lengths in tokens, by powers of two", _lengths(stats.lengths, glyphs)
    yield "Time", _time(stats.time, stats.memory, glyphs)


def _line(label: str, chart: str | Text, words: str) -> Text:
    return Text(f"{label:<{CHART_LABEL_WIDTH}}") + (Text(chart) if isinstance(chart, str) else chart) + f"  {words}"


def _shares(memory: Memory, glyphs: Glyphs) -> Iterator[Text]:
    """The bars of the paper's figure 2 and their numbers."""
    bars = kv_shares(memory)
    if not bars:
        return
    looks = list(zip(KV_SHARES, glyphs.shades, _SHARE_STYLES, strict=True))
    heads = [(f"{glyph:>6}", style) for _, glyph, style in looks]
    yield Text.assemble(" " * (CHART_LABEL_WIDTH + CHART_BAR_WIDTH + 1), *heads)
    for label, shares in bars.items():
        parts = [Part(shares[name], glyph, style) for name, glyph, style in looks]
        numbers = " ".join(f"{shares[name]:>5.0%}" for name, _, _ in looks)
        yield _line(label, stacked_bar(parts, CHART_BAR_WIDTH), numbers)
    legend = Text(" " * CHART_LABEL_WIDTH)
    for name, glyph, style in looks:
        legend.append(glyph, style).append(f" {name}   ")
    yield legend
    for name, use in memory.contiguous.schemes().items():
        if use.refused:
            which = (
                f"{use.refused:,} of {plural(use.num_sequences, 'sequence')} {'has' if use.refused == 1 else 'have'}"
            )
            yield Text(f"{name}: {which} no chunk large enough in this memory")


def _over_time(points: Sequence[TimelinePoint], block_size: int, glyphs: Glyphs) -> Iterator[Text]:
    """A sparkline for each figure; it starts at 0, and its highest value is named."""
    if not points:
        return

    def line(label: str, values: Sequence[float], word: Callable[[float], str], top: float | None = None) -> Text:
        return _line(label, sparkline(values, CHART_BAR_WIDTH, glyphs, top).ljust(CHART_BAR_WIDTH), word(max(values)))

    yield line("live blocks", [point.live for point in points], lambda v: f"up to {v:,.0f}")
    if with_blocks := [point for point in points if point.live]:
        used = [point.kv_used(block_size) for point in with_blocks]
        yield line("KV used", used, lambda v: f"up to {v:.1%}", top=1.0)
        saving = [point.sharing_saving for point in with_blocks]
        yield line("sharing saving", saving, lambda v: f"up to {v:.1%}", top=1.0)
    yield line("running sequences", [point.running for point in points], lambda v: f"up to {v:,.0f}")
    yield line("waiting rows", [point.waiting for point in points], lambda v: f"up to {v:,.0f}")
    yield line("tokens/s", _rates(points), lambda v: f"up to {v:,.0f}")
    steps = sum(point.steps for point in points)
    yield Text(f"{'':<{CHART_LABEL_WIDTH}}{steps:,} steps, {duration(points[-1].seconds)}", style="dim")


def _rates(points: Sequence[TimelinePoint]) -> list[float]:
    """Output tokens per second within each point."""
    rates, seconds, tokens = [], 0.0, 0
    for point in points:
        elapsed = point.seconds - seconds
        rates.append((point.output_tokens - tokens) / elapsed if elapsed > 0 else 0.0)
        seconds, tokens = point.seconds, point.output_tokens
    return rates


def _lengths(lengths: Lengths, glyphs: Glyphs) -> Iterator[Text]:
    """Range and mean, and how many there are in each power of two."""
    for kind, counts in (("prompt", lengths.prompt), ("output", lengths.output)):
        if not counts.count:
            continue
        buckets = {low: count for low, _, count in counts.histogram}
        last = max(buckets).bit_length()
        by_octave = [buckets.get(1 << octave >> 1, 0) for octave in range(last + 1)]
        words = f"{counts.min:,} to {counts.max:,}, mean {counts.mean:,.0f}"
        yield _line(kind, sparkline(by_octave, CHART_BAR_WIDTH, glyphs).ljust(CHART_BAR_WIDTH), words)


def _time(time: Time, memory: Memory | None, glyphs: Glyphs) -> Iterator[Text]:
    if not time.total:
        return
    for name, seconds in time.parts().items():
        bar = stacked_bar(
            [Part(seconds, glyphs.shades[0]), Part(time.total - seconds, glyphs.shades[3], "dim")], CHART_BAR_WIDTH
        )
        yield _line(name, bar, f"{percent(seconds / time.total):>6}  {duration(seconds)}")
    if memory is not None and memory.swapped_blocks and memory.swap_seconds is not None:
        moved = f"{size(memory.swapped_bytes)} swapped in {memory.swap_seconds:,.2f} s of the model's time"
        yield Text(f"{'':<{CHART_LABEL_WIDTH}}{moved}", style="dim")
    if memory is not None and memory.peak_swapped_blocks:
        held = size(memory.peak_swapped_blocks * memory.block_bytes)
        yield Text(f"{'':<{CHART_LABEL_WIDTH}}{held} of host memory held swapped blocks at most", style="dim")


def _print_settings(stats: Stats, console: Console, ascii_only: bool) -> None:
    if not stats.settings:
        return
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("Setting", no_wrap=True)
    table.add_column("Value", no_wrap=True, overflow="crop" if ascii_only else "ellipsis", max_width=44)
    table.add_column("From", no_wrap=True)
    for name, setting in ordered_settings(stats):
        table.add_row(Text(name), Text(setting.text(ascii_only=ascii_only)), Text(setting.source))
    console.print()
    console.print(table)

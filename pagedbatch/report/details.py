"""The long report, below the short one: where contiguous memory went, the run over time, lengths, time, settings.

Knows the keys of OUT.stats.json; knows no engine and no file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pagedbatch.report.breakdown import print_breakdown
from pagedbatch.report.charts import ASCII, Glyphs, Part, glyphs_for, sparkline, stacked_bar
from pagedbatch.report.summary import CHART_BAR_WIDTH, CHART_LABEL_WIDTH
from pagedbatch.stats.baselines import SCHEMES
from pagedbatch.wording import duration, percent, plural, size

Point = Mapping[str, Any]

_STATES = (("used", "green"), ("reserved", "blue"), ("internal", "yellow"), ("external", "bright_black"))


def details(stats: Mapping[str, Any], console: Console) -> None:
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
    _print_settings(stats["settings"], console, ascii_only=glyphs is ASCII)
    if stats["versions"]:
        versions = ", ".join(f"{name} {version}" for name, version in stats["versions"].items())
        console.print(Text.assemble(("\nVersions\n", "bold"), versions))


def _sections(stats: Mapping[str, Any], glyphs: Glyphs) -> Iterator[tuple[str, Iterator[Text]]]:
    """Titles and lines. Merged shards whose blocks differ in size have no memory in common."""
    memory = stats["memory"]
    if memory is not None:
        yield "Where KV memory goes", _shares(memory, glyphs)
        yield "Over the run", _over_time(stats["timeline"], memory["block_size"], glyphs)
    yield "Lengths in tokens, by powers of two", _lengths(stats.get("lengths", {}), glyphs)
    yield "Time", _time(stats["time"], memory or {}, glyphs)


def _line(label: str, chart: str | Text, words: str) -> Text:
    return Text(f"{label:<{CHART_LABEL_WIDTH}}") + (Text(chart) if isinstance(chart, str) else chart) + f"  {words}"


def _shares(memory: Mapping[str, Any], glyphs: Glyphs) -> Iterator[Text]:
    """The bars of the paper's figure 2 and their numbers: the run's own, then the contiguous schemes'."""
    contiguous, kv_used = memory["contiguous"], memory["kv_used"]
    if kv_used is None or not any(contiguous[name]["replayed"] or contiguous[name]["refused"] for name in SCHEMES):
        return
    bars = {"paged, this run": {"used": kv_used, "reserved": 0.0, "internal": 1 - kv_used, "external": 0.0}}
    bars |= {f"contiguous {name}": contiguous[name] for name in SCHEMES}
    looks = [(name, glyph, style) for glyph, (name, style) in zip(glyphs.shades, _STATES, strict=True)]
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
    for name in SCHEMES:
        refused, count = contiguous[name]["refused"], contiguous[name]["refused"] + contiguous[name]["replayed"]
        if refused:
            which = f"{refused:,} of {plural(count, 'sequence')} {'has' if refused == 1 else 'have'}"
            yield Text(f"{name}: {which} no chunk large enough in this memory")


def _over_time(points: Sequence[Point], block_size: int, glyphs: Glyphs) -> Iterator[Text]:
    """A sparkline a figure; each starts at 0 and names its highest point."""
    if not points:
        return

    def row(label: str, values: Sequence[float], word: Callable[[float], str], top: float | None = None) -> Text:
        return _line(label, sparkline(values, CHART_BAR_WIDTH, glyphs, top).ljust(CHART_BAR_WIDTH), word(max(values)))

    live = [point["private"] + point["shared"] for point in points]
    held = [(point, blocks) for point, blocks in zip(points, live, strict=True) if blocks]
    yield row("live blocks", live, lambda v: f"up to {v:,.0f}")
    if held:
        used = [point["filled_slots"] / (blocks * block_size) for point, blocks in held]
        saving = [1 - blocks / point["logical"] for point, blocks in held]
        yield row("KV used", used, lambda v: f"up to {v:.1%}", top=1.0)
        yield row("sharing saving", saving, lambda v: f"up to {v:.1%}", top=1.0)
    yield row("running sequences", [point["running"] for point in points], lambda v: f"up to {v:,.0f}")
    yield row("waiting rows", [point["waiting"] for point in points], lambda v: f"up to {v:,.0f}")
    yield row("tokens/s", _rates(points), lambda v: f"up to {v:,.0f}")
    steps = sum(point["steps"] for point in points)
    yield Text(f"{'':<{CHART_LABEL_WIDTH}}{steps:,} steps, {duration(points[-1]['seconds'])}", style="dim")


def _rates(points: Sequence[Point]) -> list[float]:
    """Output tokens a second within each point."""
    start = {"seconds": 0.0, "output_tokens": 0}
    rates = []
    for before, point in pairwise([start, *points]):
        seconds = point["seconds"] - before["seconds"]
        rates.append((point["output_tokens"] - before["output_tokens"]) / seconds if seconds > 0 else 0.0)
    return rates


def _lengths(lengths: Mapping[str, Any], glyphs: Glyphs) -> Iterator[Text]:
    """Range and mean, and how many there are in each power of two."""
    for kind, counts in lengths.items():
        if not counts["count"]:
            continue
        buckets = {low: count for low, _, count in counts["histogram"]}
        last = max(buckets).bit_length()
        by_octave = [buckets.get(1 << octave >> 1, 0) for octave in range(last + 1)]
        words = f"{counts['min']:,} to {counts['max']:,}, mean {counts['mean']:,.0f}"
        yield _line(kind, sparkline(by_octave, CHART_BAR_WIDTH, glyphs).ljust(CHART_BAR_WIDTH), words)


def _time(time: Mapping[str, float], memory: Mapping[str, Any], glyphs: Glyphs) -> Iterator[Text]:
    total = sum(time.values())
    if total <= 0:
        return
    for name, seconds in time.items():
        bar = stacked_bar(
            [Part(seconds, glyphs.shades[0]), Part(total - seconds, glyphs.shades[3], "dim")], CHART_BAR_WIDTH
        )
        yield _line(name, bar, f"{percent(seconds / total):>6}  {duration(seconds)}")
    if memory.get("swapped_blocks") and "swap_seconds" in memory:  # older files don't say
        moved = f"{size(memory['swapped_bytes'])} swapped in {memory['swap_seconds']:,.2f} s of the model's time"
        yield Text(f"{'':<{CHART_LABEL_WIDTH}}{moved}", style="dim")
    if memory.get("peak_swapped_blocks"):
        held = size(memory["peak_swapped_blocks"] * memory["block_bytes"])
        yield Text(f"{'':<{CHART_LABEL_WIDTH}}{held} of host memory held swapped blocks at most", style="dim")


def _print_settings(settings: Mapping[str, Any], console: Console, ascii_only: bool) -> None:
    """Settings that somebody chose come first, defaults after them; what an `auto` came to follows its value."""
    if not settings:
        return
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("Setting", no_wrap=True)
    table.add_column("Value", no_wrap=True, overflow="crop" if ascii_only else "ellipsis", max_width=44)
    table.add_column("From", no_wrap=True)
    for name, entry in sorted(settings.items(), key=lambda item: item[1]["source"] == "default"):
        value = json.dumps(entry["value"], ensure_ascii=ascii_only)
        if "used" in entry and entry["used"] != entry["value"]:
            value += f": {json.dumps(entry['used'], ensure_ascii=ascii_only)}"
        table.add_row(Text(name), Text(value), Text(entry["source"]))
    console.print()
    console.print(table)

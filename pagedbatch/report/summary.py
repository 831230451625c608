"""The short report at the end of a run."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from pagedbatch.report.breakdown import summary_lines
from pagedbatch.report.charts import Part, glyphs_for, stacked_bar
from pagedbatch.report.wording import pool_size, saved_blocks
from pagedbatch.stats.schema import Memory, PrefixCache, RowCounts, Stats, Throughput, Time
from pagedbatch.wording import duration, percent, plural

CHART_LABEL_WIDTH = 19
CHART_BAR_WIDTH = 36
_LABEL_WIDTH = 10
_CHART_NUMBERS_WIDTH = 23


def summary(stats: Stats, console: Console) -> None:
    """Prints what a run did and what its memory held, in at most 20 lines of 80 columns."""
    lines = [
        ("rows", _rows(stats.rows)),
        ("steps", _steps(stats.throughput)) if stats.simulated else ("speed", _speed(stats.throughput)),
        *summary_lines(stats),
        *_memory_lines(stats.memory),
        ("time", time_shares(stats.time)),
    ]
    for label, text in lines:
        _print(console, label, Text(text))
    if stats.memory is not None and stats.memory.kv_used is not None:
        print_kv_chart(stats.memory, stats.memory.kv_used, console)


def _print(console: Console, label: str, text: Text) -> None:
    console.print(Text.assemble((f"{label:<{_LABEL_WIDTH}}", "bold"), text))


def _rows(rows: RowCounts) -> str:
    parts = [f"{rows.ok:,} ok", plural(rows.error, "error")]
    if rows.resumed:
        parts.append(f"{rows.resumed:,} of them resumed")
    unfinished = rows.total - rows.ok - rows.error
    if unfinished:
        parts.append(f"{unfinished:,} not done")
    return f"{rows.total:,}: {', '.join(parts)}"


def _speed(throughput: Throughput) -> str:
    if not throughput.output_tokens:
        return "no token was generated"
    return (
        f"{throughput.output_tokens_per_second:,.0f} tokens/s: {throughput.output_tokens:,} out in "
        f"{duration(throughput.seconds)}, start-up {duration(throughput.startup_seconds)}"
    )


def _steps(throughput: Throughput) -> str:
    """Instead of a speed, where no model ran."""
    return (
        f"{throughput.steps:,} without a model, {throughput.output_tokens:,} tokens out, "
        f"in {duration(throughput.seconds)}"
    )


def _memory_lines(memory: Memory | None) -> list[tuple[str, str]]:
    if memory is None:
        return [("pools", "of blocks that differ in size: each has an account of its own")]
    if memory.kv_used is None:
        return [("pool", f"{pool_size(memory)}; no step ran")]
    mean, peak = memory.mean_live_blocks / memory.num_blocks, memory.peak_live_blocks / memory.num_blocks
    return [
        ("pool", f"{pool_size(memory)}; {mean:.0%} live, {peak:.0%} at peak"),
        ("sharing", _sharing(memory)),
        ("prefixes", _prefix_cache(memory.prefix_cache)),
        ("preempted", _preemptions(memory)),
        *_failures(memory.failed_steps),
    ]


def _sharing(memory: Memory) -> str:
    copies = plural(memory.cow_copies, "CoW copy", "CoW copies")
    if not memory.mean_saved_blocks:
        return f"none; {copies}"
    return f"{percent(memory.sharing_saving)} saved, {saved_blocks(memory)}; {copies}"


def _prefix_cache(cache: PrefixCache) -> str:
    queried, hit = cache.queried_tokens, cache.hit_tokens
    if not queried:
        return "cache not used"
    return f"{hit:,} of {queried:,} prompt tokens found in the cache ({percent(hit / queried)})"


def _preemptions(memory: Memory) -> str:
    parts = []
    if memory.preemptions.swap:
        parts.append(f"swap {memory.preemptions.swap:,} ({plural(memory.swapped_blocks, 'block')})")
    if memory.preemptions.recompute:
        parts.append(f"recompute {memory.preemptions.recompute:,} ({plural(memory.recomputed_tokens, 'token')})")
    return ", ".join(parts) or "none"


def _failures(failed_steps: int) -> list[tuple[str, str]]:
    if not failed_steps:
        return []
    return [("failed", f"{plural(failed_steps, 'step')}, taken back and tried again row by row")]


def time_shares(time: Time) -> str:
    """`model 52%  attention 30%  ...` in the order of the stats."""
    if not time.total:
        return "nothing was timed"
    return "  ".join(f"{name} {seconds / time.total:.0%}" for name, seconds in time.parts().items())


def print_kv_chart(memory: Memory, kv_used: float, console: Console) -> None:
    """KV memory that held tokens: this run against contiguous regions on the same rows."""
    glyphs = glyphs_for(console)
    bars = [("paged, this run", kv_used, memory.mean_running_sequences)]
    for name, use in memory.contiguous.schemes().items():
        if use.num_sequences:
            bars.append((f"contiguous {name}", use.used, use.mean_sequences))
    bar_width = max(8, min(CHART_BAR_WIDTH, console.width - CHART_LABEL_WIDTH - _CHART_NUMBERS_WIDTH))
    title = f"{'KV memory that holds tokens':<{CHART_LABEL_WIDTH + bar_width}}{'used':>8}{'seqs at once':>15}"
    console.print()
    console.print(Text(title, style="bold"), no_wrap=True)
    for label, used, at_once in bars:
        parts = [Part(used, glyphs.shades[0], "green"), Part(1 - used, glyphs.shades[3], "dim")]
        line = Text(f"{label:<{CHART_LABEL_WIDTH}}") + stacked_bar(parts, bar_width)
        console.print(line + Text(f"{percent(used):>8}{at_once:>15,.1f}"), no_wrap=True)
    if len(bars) > 1:
        sequences = plural(memory.contiguous.num_sequences, "sequence")
        note = f"contiguous: {sequences} of this run replayed, each in one region of its own"
        console.print(Text(note, style="dim"), no_wrap=True)

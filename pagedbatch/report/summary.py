"""The short report at the end of a run, from the stats alone. Knows the keys of OUT.stats.json; knows no engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from pagedbatch.report.breakdown import summary_lines
from pagedbatch.report.charts import Part, glyphs_for, stacked_bar
from pagedbatch.stats.baselines import SCHEMES
from pagedbatch.wording import duration, percent, plural, sized

CHART_LABEL_WIDTH = 19
CHART_BAR_WIDTH = 36
_LABEL_WIDTH = 10
_CHART_NUMBERS_WIDTH = 23


def summary(stats: Mapping[str, Any], console: Console) -> None:
    """Prints what a run did and what its memory held, in at most 20 lines of 80 columns."""
    lines = [
        ("rows", _rows(stats["rows"])),
        ("steps", _steps(stats["throughput"])) if stats.get("simulated") else ("speed", _speed(stats["throughput"])),
        *summary_lines(stats),
        *_memory_lines(stats["memory"]),
        ("time", time_shares(stats["time"])),
    ]
    for label, text in lines:
        _print(console, label, Text(text))
    if stats["memory"] is not None and stats["memory"]["kv_used"] is not None:
        print_kv_chart(stats["memory"], console)


def _print(console: Console, label: str, text: Text) -> None:
    console.print(Text.assemble((f"{label:<{_LABEL_WIDTH}}", "bold"), text))


def _rows(rows: Mapping[str, Any]) -> str:
    parts = [f"{rows['ok']:,} ok", plural(rows["error"], "error")]
    if rows["resumed"]:
        parts.append(f"{rows['resumed']:,} of them resumed")
    unfinished = rows["total"] - rows["ok"] - rows["error"]
    if unfinished:
        parts.append(f"{unfinished:,} not done")
    return f"{rows['total']:,}: {', '.join(parts)}"


def _speed(throughput: Mapping[str, Any]) -> str:
    if not throughput["output_tokens"]:
        return "no token was generated"
    return (
        f"{throughput['output_tokens_per_second']:,.0f} tokens/s: {throughput['output_tokens']:,} out in "
        f"{duration(throughput['seconds'])}, start-up {duration(throughput['startup_seconds'])}"
    )


def _steps(throughput: Mapping[str, Any]) -> str:
    """Instead of a speed, where no model ran."""
    return (
        f"{throughput['steps']:,} without a model, {throughput['output_tokens']:,} tokens out, "
        f"in {duration(throughput['seconds'])}"
    )


def _memory_lines(memory: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    if memory is None:
        return [("pools", "of blocks that differ in size: each has an account of its own")]
    num_blocks, block_bytes = memory["num_blocks"], memory["block_bytes"]
    pool = f"{plural(num_blocks, 'block')} of {plural(memory['block_size'], 'token')}"
    pool = sized(pool, num_blocks * block_bytes)
    if memory["kv_used"] is None:
        return [("pool", f"{pool}; no step ran")]
    mean, peak = memory["mean_live_blocks"] / num_blocks, memory["peak_live_blocks"] / num_blocks
    return [
        ("pool", f"{pool}; {mean:.0%} live, {peak:.0%} at peak"),
        ("sharing", _sharing(memory)),
        ("prefixes", _prefix_cache(memory["prefix_cache"])),
        ("preempted", _preemptions(memory)),
        *_failures(memory.get("failed_steps", 0)),
    ]


def _sharing(memory: Mapping[str, Any]) -> str:
    copies = plural(memory["cow_copies"], "CoW copy", "CoW copies")
    saved = memory["mean_logical_blocks"] - memory["mean_live_blocks"]
    if saved <= 0:
        return f"none; {copies}"
    blocks = sized(plural(round(saved), "block"), saved * memory["block_bytes"])
    return f"{percent(memory['sharing_saving'])} saved, on average {blocks}; {copies}"


def _prefix_cache(cache: Mapping[str, Any]) -> str:
    queried, hit = cache["queried_tokens"], cache["hit_tokens"]
    if not queried:
        return "cache not used"
    return f"{hit:,} of {queried:,} prompt tokens found in the cache ({percent(hit / queried)})"


def _preemptions(memory: Mapping[str, Any]) -> str:
    swap, recompute = memory["preemptions"]["swap"], memory["preemptions"]["recompute"]
    parts = []
    if swap:
        parts.append(f"swap {swap:,} ({plural(memory['swapped_blocks'], 'block')})")
    if recompute:
        parts.append(f"recompute {recompute:,} ({plural(memory['recomputed_tokens'], 'token')})")
    return ", ".join(parts) or "none"


def _failures(failed_steps: int) -> list[tuple[str, str]]:
    if not failed_steps:
        return []
    return [("failed", f"{plural(failed_steps, 'step')}, taken back and tried again row by row")]


def time_shares(time: Mapping[str, float]) -> str:
    """`model 52%  attention 30%  ...` in the order of the stats."""
    total = sum(time.values())
    if total <= 0:
        return "nothing was timed"
    return "  ".join(f"{name} {seconds / total:.0%}" for name, seconds in time.items())


def print_kv_chart(memory: Mapping[str, Any], console: Console) -> None:
    """KV memory that held tokens: this run against contiguous regions on the same rows."""
    glyphs = glyphs_for(console)
    bars = [("paged, this run", memory["kv_used"], memory["mean_running_sequences"])]
    for name in SCHEMES:
        scheme = memory["contiguous"][name]
        if scheme["replayed"] or scheme["refused"]:
            bars.append((f"contiguous {name}", scheme["used"], scheme["mean_sequences"]))
    bar_width = max(8, min(CHART_BAR_WIDTH, console.width - CHART_LABEL_WIDTH - _CHART_NUMBERS_WIDTH))
    title = f"{'KV memory that holds tokens':<{CHART_LABEL_WIDTH + bar_width}}{'used':>8}{'seqs at once':>15}"
    console.print()
    console.print(Text(title, style="bold"), no_wrap=True)
    for label, used, at_once in bars:
        parts = [Part(used, glyphs.shades[0], "green"), Part(1 - used, glyphs.shades[3], "dim")]
        line = Text(f"{label:<{CHART_LABEL_WIDTH}}") + stacked_bar(parts, bar_width)
        console.print(line + Text(f"{percent(used):>8}{at_once:>15,.1f}"), no_wrap=True)
    if len(bars) > 1:
        console.print(Text(replay_note(memory["contiguous"]), style="dim"), no_wrap=True)


def replay_note(contiguous: Mapping[str, Any]) -> str:
    """What the contiguous figures stand on."""
    count = max(contiguous[name]["replayed"] + contiguous[name]["refused"] for name in SCHEMES)
    return f"contiguous: {plural(count, 'sequence')} of this run replayed, each in one region of its own"

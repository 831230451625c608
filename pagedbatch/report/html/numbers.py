"""The figures of a run in words: headline cards, and the table of everything counted. Knows the keys, no HTML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pagedbatch.stats.baselines import SCHEMES
from pagedbatch.wording import duration, percent, plural, sized

Stats = Mapping[str, Any]


class Card(NamedTuple):
    figure: str
    name: str
    note: str


def cards(stats: Stats) -> list[Card]:
    """What a reader wants to know first."""
    memory, throughput = stats["memory"], stats["throughput"]
    found = [
        Card(
            f"{throughput['output_tokens_per_second']:,.0f}",
            "output tokens a second",
            f"{throughput['output_tokens']:,} in {duration(throughput['seconds'])}",
        )
    ]
    if memory["kv_used"] is None:
        return found
    contiguous = memory["contiguous"]["max"]
    has_replay = contiguous["replayed"] > 0
    found.append(
        Card(
            percent(memory["kv_used"]),
            "of live KV memory holds tokens",
            f"contiguous to the limit: {percent(contiguous['used'])}" if has_replay else "",
        )
    )
    saved = memory["mean_logical_blocks"] - memory["mean_live_blocks"]
    found.append(
        Card(
            percent(memory["sharing_saving"]),
            "of blocks saved by sharing",
            f"on average {sized(plural(round(saved), 'block'), max(0.0, saved) * memory['block_bytes'])}",
        )
    )
    room = memory["num_blocks"] * memory["mean_running_sequences"] / memory["mean_live_blocks"]
    found.append(
        Card(
            f"{room:,.0f}",
            "sequences would fit the pool",
            f"contiguous to the limit: {contiguous['room']:,.0f}" if has_replay and "room" in contiguous else "",
        )
    )
    return found


def table(stats: Stats) -> dict[str, str]:
    """Everything that was counted, by name."""
    rows, memory, throughput = stats["rows"], stats["memory"], stats["throughput"]
    prefix, preemptions = memory["prefix_cache"], memory["preemptions"]
    named = {
        "rows": f"{rows['total']:,}: {rows['ok']:,} ok, {plural(rows['error'], 'error')}, {rows['resumed']:,} resumed",
        "output tokens": f"{throughput['output_tokens']:,}",
        "speed": f"{throughput['output_tokens_per_second']:,.0f} tokens/s",
        "time": f"{duration(throughput['seconds'])}, start-up {duration(throughput['startup_seconds'])}",
        "pool": sized(
            f"{plural(memory['num_blocks'], 'block')} of {plural(memory['block_size'], 'token')}",
            memory["num_blocks"] * memory["block_bytes"],
        ),
        "live blocks": f"{memory['mean_live_blocks']:,.1f} on average, {memory['peak_live_blocks']:,} at peak",
        "sequences at once": f"{memory['mean_running_sequences']:,.1f} on average",
        "KV used": percent(memory["kv_used"]),
        "internal waste": percent(None if memory["kv_used"] is None else 1 - memory["kv_used"]),
        "sharing saving": percent(memory["sharing_saving"]),
        "copy-on-write copies": f"{memory['cow_copies']:,}",
        "prompt tokens from the cache": f"{prefix['hit_tokens']:,} of {prefix['queried_tokens']:,}",
        "preempted by swap": _swap(memory),
        "preempted by recompute": f"{preemptions['recompute']:,} ({plural(memory['recomputed_tokens'], 'token')})",
    }
    for name in SCHEMES:
        scheme = memory["contiguous"][name]
        if scheme["replayed"] or scheme["refused"]:
            named[f"contiguous {name}"] = _contiguous(scheme)
    return named


def _swap(memory: Mapping[str, Any]) -> str:
    moved = [sized(plural(memory["swapped_blocks"], "block"), memory["swapped_blocks"] * memory["block_bytes"])]
    if "swap_seconds" in memory:  # older files don't say
        moved.append(duration(memory["swap_seconds"]))
    return f"{memory['preemptions']['swap']:,} ({', '.join(moved)})"


def _contiguous(scheme: Mapping[str, Any]) -> str:
    words = [f"{percent(scheme['used'])} used", f"{scheme['mean_sequences']:,.1f} sequences at once"]
    if "room" in scheme:  # older files don't say
        words.append(f"{scheme['room']:,.0f} would fit")
    if scheme["refused"]:
        words.append(f"{scheme['refused']:,} can never fit")
    return ", ".join(words)

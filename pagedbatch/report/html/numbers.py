"""A run in numbers: headline cards, and the table of everything that was counted."""

from __future__ import annotations

from typing import NamedTuple

from pagedbatch.report.wording import pool_size, saved_blocks
from pagedbatch.stats.schema import ContiguousUse, Memory, Stats
from pagedbatch.wording import duration, percent, plural, sized


class Card(NamedTuple):
    figure: str
    name: str
    note: str


def cards(stats: Stats) -> list[Card]:
    """What a reader wants to know first."""
    memory, throughput = stats.memory, stats.throughput
    found = [
        Card(
            f"{throughput.output_tokens_per_second:,.0f}",
            "output tokens per second",
            f"{throughput.output_tokens:,} in {duration(throughput.seconds)}",
        )
    ]
    if memory is None or memory.kv_used is None:
        return found
    contiguous = memory.contiguous.max
    used = f"contiguous to the limit: {percent(contiguous.used)}" if contiguous.replayed else ""
    found.append(Card(percent(memory.kv_used), "of live KV memory holds tokens", used))
    found.append(Card(percent(memory.sharing_saving), "of blocks saved by sharing", saved_blocks(memory)))
    room = memory.num_blocks * memory.mean_running_sequences / memory.mean_live_blocks
    has_room = contiguous.replayed and contiguous.room is not None
    note = f"contiguous to the limit: {contiguous.room:,.0f}" if has_room else ""
    found.append(Card(f"{room:,.0f}", "sequences would fit the pool", note))
    return found


def table(stats: Stats) -> dict[str, str]:
    """Everything that was counted, by name."""
    rows, memory, throughput = stats.rows, stats.memory, stats.throughput
    named = {
        "rows": f"{rows.total:,}: {rows.ok:,} ok, {plural(rows.error, 'error')}, {rows.resumed:,} resumed",
        "output tokens": f"{throughput.output_tokens:,}",
        "speed": f"{throughput.output_tokens_per_second:,.0f} tokens/s",
        "time": f"{duration(throughput.seconds)}, start-up {duration(throughput.startup_seconds)}",
    }
    return named if memory is None else named | _memory(memory)


def _memory(memory: Memory) -> dict[str, str]:
    prefix, recomputed = memory.prefix_cache, plural(memory.recomputed_tokens, "token")
    named = {
        "pool": pool_size(memory),
        "live blocks": f"{memory.mean_live_blocks:,.1f} on average, {memory.peak_live_blocks:,} at peak",
        "sequences at once": f"{memory.mean_running_sequences:,.1f} on average",
        "KV used": percent(memory.kv_used),
        "internal waste": percent(None if memory.kv_used is None else 1 - memory.kv_used),
        "sharing saving": percent(memory.sharing_saving),
        "copy-on-write copies": f"{memory.cow_copies:,}",
        "prompt tokens from the cache": f"{prefix.hit_tokens:,} of {prefix.queried_tokens:,}",
        "preempted by swap": _swap(memory),
        "preempted by recompute": f"{memory.preemptions.recompute:,} ({recomputed})",
    }
    uses = memory.contiguous.schemes().items()
    return named | {f"contiguous {name}": _contiguous(use) for name, use in uses if use.num_sequences}


def _swap(memory: Memory) -> str:
    moved = [sized(plural(memory.swapped_blocks, "block"), memory.swapped_blocks * memory.block_bytes)]
    if memory.swap_seconds is not None:
        moved.append(duration(memory.swap_seconds))
    return f"{memory.preemptions.swap:,} ({', '.join(moved)})"


def _contiguous(use: ContiguousUse) -> str:
    words = [f"{percent(use.used)} used", f"{use.mean_sequences:,.1f} sequences at once"]
    if use.room is not None:
        words.append(f"{use.room:,.0f} would fit")
    if use.refused:
        words.append(f"{use.refused:,} can never fit")
    return ", ".join(words)

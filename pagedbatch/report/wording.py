"""What the terminal report and the page both say."""

from __future__ import annotations

from pagedbatch.stats.schema import KV_SHARES, Memory, PoolMemory, Setting, Stats
from pagedbatch.wording import plural, sized


def pool_size(memory: PoolMemory) -> str:
    """`20 blocks of 16 tokens, 20.0 MiB`."""
    blocks = f"{plural(memory.num_blocks, 'block')} of {plural(memory.block_size, 'token')}"
    return sized(blocks, memory.pool_bytes)


def saved_blocks(memory: PoolMemory) -> str:
    """`on average 10 blocks, 10.0 MiB`: what sharing saved."""
    saved = memory.mean_saved_blocks
    return f"on average {sized(plural(round(saved), 'block'), saved * memory.block_bytes)}"


def kv_shares(memory: Memory) -> dict[str, dict[str, float]]:
    """Where KV memory went by `KV_SHARES`, as in the paper's figure 2: in this run, and in the contiguous schemes.

    Empty where no step held a block or no sequence was replayed.
    """
    if memory.kv_used is None or not memory.contiguous.num_sequences:
        return {}
    own = {"used": memory.kv_used, "reserved": 0.0, "internal": 1 - memory.kv_used, "external": 0.0}
    bars = {"paged, this run": own}
    for name, use in memory.contiguous.schemes().items():
        bars[f"contiguous {name}"] = {share: getattr(use, share) for share in KV_SHARES}
    return bars


def ordered_settings(stats: Stats) -> list[tuple[str, Setting]]:
    """Settings that somebody chose come first, defaults after them."""
    return sorted(stats.settings.items(), key=lambda item: item[1].source == "default")

"""What to set: a block size, and a pool in which no row waits for memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pagedbatch.settings import OPTIONS
from pagedbatch.tools.plan.forecast import Forecast

#: The slots that a sequence may take in the advised blocks, as a multiple of those that it takes in the best blocks.
_NEARLY_BEST = 1.03
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


@dataclass(frozen=True, slots=True)
class Advice:
    """`kv_bytes` is the size of the pool in which no row waits for a block; `kv_memory` is that as `--kv-memory`."""

    block_size: int
    kv_bytes: int
    kv_memory: str


def best_block_size(by_size: Sequence[Forecast]) -> int:
    """The largest size with which a sequence takes hardly more than with the best one: block tables are short then."""
    least = min(each.slots_per_sequence for each in by_size)
    return max(each.block_size for each in by_size if each.slots_per_sequence <= least * _NEARLY_BEST)


def blocks_wanted(longest: Forecast, max_width: int) -> int:
    """Blocks of a pool in which no row waits for one.

    Args:
        longest: the longest outputs that are possible, in unlimited memory.
        max_width: the maximum number of sequences of a row.
    """
    # The scheduler starts a row only if half a block is left for each running sequence, and a tail for each new one.
    return longest.peak_live_blocks + longest.peak_running_sequences // 2 + max_width


def advise(longest: Forecast, max_width: int, token_bytes: int) -> Advice:
    """That pool, with blocks of the size that `longest` has."""
    kv_memory = _rounded_up(blocks_wanted(longest, max_width) * longest.block_size * token_bytes)
    return Advice(longest.block_size, OPTIONS["kv_memory"].checked(kv_memory), kv_memory)


def _rounded_up(num_bytes: int) -> str:
    """A size of at least `num_bytes`, with at most three digits."""
    unit, factor = next((each for each in _UNITS if num_bytes >= each[1]), _UNITS[-1])
    value = num_bytes / factor
    step = 10.0 ** (max(0, math.floor(math.log10(value))) - 1) if value >= 1 else 0.1
    rounded = math.ceil(value / step) * step
    return f"{rounded:.1f}".removesuffix(".0") + unit

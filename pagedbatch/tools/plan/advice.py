"""What to set: a block size, and a pool in which no row waits for memory. Knows forecasts only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pagedbatch.settings import OPTIONS
from pagedbatch.tools.plan.forecast import Forecast

#: The largest block size is taken that holds no more than this, as a multiple of what the best one holds.
_NEARLY_BEST = 1.03
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


@dataclass(frozen=True, slots=True)
class Advice:
    """`kv_bytes` make the pool in which no row waits for a block; `kv_memory` is that as it is typed."""

    block_size: int
    kv_bytes: int
    kv_memory: str


def best_block_size(by_size: Sequence[Forecast]) -> int:
    """The largest size whose blocks hold hardly more for a sequence than those of the best: tables are short then."""
    least = min(each.slots_a_sequence for each in by_size)
    return max(each.block_size for each in by_size if each.slots_a_sequence <= least * _NEARLY_BEST)


def blocks_wanted(longest: Forecast, widest: int) -> int:
    """Blocks of a pool in which no row waits for one.

    Args:
        longest: the longest outputs that are possible, in ample memory.
        widest: the most sequences that one row has.
    """
    # The scheduler starts a row only while half a block for each running sequence stays, and a tail for each new one.
    return longest.peak_live_blocks + longest.peak_running_sequences // 2 + widest


def advise(longest: Forecast, widest: int, token_bytes: int) -> Advice:
    """That pool, with blocks of the size that `longest` has."""
    kv_memory = _rounded_up(blocks_wanted(longest, widest) * longest.block_size * token_bytes)
    return Advice(longest.block_size, OPTIONS["kv_memory"].checked(kv_memory), kv_memory)


def _rounded_up(num_bytes: int) -> str:
    """A size of at least so many bytes, with at most three digits."""
    unit, factor = next((each for each in _UNITS if num_bytes >= each[1]), _UNITS[-1])
    value = num_bytes / factor
    step = 10.0 ** (max(0, math.floor(math.log10(value))) - 1) if value >= 1 else 0.1
    rounded = math.ceil(value / step) * step
    return f"{rounded:.1f}".removesuffix(".0") + unit

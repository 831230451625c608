"""A bounded picture of who holds which blocks, taken when the pool is fuller than before."""

from __future__ import annotations

from collections.abc import Iterable

from pagedbatch.outputs import BlockMap, BlockRun, HeldBlocks

MAX_SEQUENCES = 64
MAX_BLOCKS_EACH = 512


class PeakMapper:
    """Draws the running sequences' tables whenever a tenth more blocks are live than at the last drawing.

    So the newest map shows the fullest step or one within a tenth of it, and a run in which the pool grows to N blocks
    draws about log N maps: the cost of a step is constant on average, and a map's is bounded.
    """

    def __init__(self) -> None:
        self._live_at_last = 0

    def wants(self, live_blocks: int) -> bool:
        return 10 * live_blocks > 11 * self._live_at_last

    def draw(self, live_blocks: int, tables: Iterable[tuple[int, list[int]]], num_sequences: int) -> BlockMap:
        """Draws the first of `tables`, pairs of (request id, block ids); `num_sequences` counts them all."""
        self._live_at_last = live_blocks
        numbers: dict[int, int] = {}
        held: list[HeldBlocks] = []
        for request_id, blocks in tables:
            if len(held) == MAX_SEQUENCES:
                break
            held.append(HeldBlocks(request_id, _runs(blocks[:MAX_BLOCKS_EACH], numbers), len(blocks)))
        return BlockMap(live_blocks, num_sequences, held)


def _runs(blocks: list[int], numbers: dict[int, int]) -> list[BlockRun]:
    """A table as runs of consecutive numbers; a block is numbered when it is first seen, a dropped one is -1."""
    runs: list[BlockRun] = []
    for block_id in blocks:
        number = -1 if block_id < 0 else numbers.setdefault(block_id, len(numbers))
        if runs and number == (-1 if runs[-1].first < 0 else runs[-1].first + runs[-1].length):
            runs[-1] = BlockRun(runs[-1].first, runs[-1].length + 1)
        else:
            runs.append(BlockRun(number, 1))
    return runs

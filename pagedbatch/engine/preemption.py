"""Takes blocks from running groups when they run short: by swapping them to the host, or by recomputation."""

from __future__ import annotations

from pagedbatch.config import PreemptionMode
from pagedbatch.engine.block_manager import BlockManager
from pagedbatch.engine.queues import Queues
from pagedbatch.engine.sources import SourceTables
from pagedbatch.engine.step_builder import StepBuilder
from pagedbatch.outputs import EngineCounters
from pagedbatch.sequence import GroupState, SequenceGroup


class Preemption:
    """A group is preempted as one, with its source."""

    def __init__(
        self,
        mode: PreemptionMode,
        blocks: BlockManager,
        sources: SourceTables,
        queues: Queues,
        counters: EngineCounters,
    ) -> None:
        self._mode = mode
        self._blocks = blocks
        self._sources = sources
        self._queues = queues
        self._counters = counters

    def make_room(self, needed: int, builder: StepBuilder, first_victim: int) -> bool:
        """Preempts from the tail until `needed` blocks are available. False when even that is not enough now."""
        pool = self._blocks.pool
        while needed > pool.num_available and (victim := self._queues.pop_victim(first_victim)) is not None:
            self._preempt(victim, builder)
            builder.short_of_blocks = True
        if needed > pool.num_available:
            builder.short_of_blocks = True
            return False
        return True

    def drop_blocks(self, group: SequenceGroup) -> None:
        """Takes all blocks from a group, which will compute its K/V again."""
        open_ids = self._open_ids(group) + self._sources.open_ids(group)
        # It may have been half rebuilt.
        group.num_blocks_lost = max(self._blocks.num_distinct_blocks(open_ids), group.num_blocks_lost)
        for seq_id in open_ids:
            self._blocks.free(seq_id)
        for seq in group.sequences:
            seq.num_computed_tokens = 0
        group.num_preemptions += 1
        group.state = GroupState.WAITING
        self._counters.preemptions_recompute += 1

    def _preempt(self, group: SequenceGroup, builder: StepBuilder) -> None:
        """Takes all blocks from a group and sends it back to the queue."""
        open_ids = self._open_ids(group)
        all_ids = open_ids + self._sources.open_ids(group)
        num_blocks = self._blocks.num_distinct_blocks(all_ids)
        if self._should_swap(group, len(open_ids), num_blocks):
            builder.swap_out += self._blocks.swap_out(all_ids)
            builder.swapped_out.append(group)
            group.num_preemptions += 1
            group.state = GroupState.SWAPPED
            self._counters.preemptions_swap += 1
            self._counters.swapped_out_blocks += num_blocks
        else:
            self.drop_blocks(group)
        self._queues.enqueue(group)

    def _open_ids(self, group: SequenceGroup) -> list[int]:
        """The sequences of a group that have a table."""
        return [seq.seq_id for seq in group.sequences if self._blocks.has_table(seq.seq_id)]

    def _should_swap(self, group: SequenceGroup, num_open: int, num_blocks: int) -> bool:
        """Whether a victim is swapped. A group that is still rebuilding its tables, or finds no room, is not.

        `auto` swaps groups of several sequences and recomputes single ones, as the paper's system did: one sequence
        comes back in one batched prefill, while rebuilding siblings costs a prefill each for their own tails.
        """
        fits = num_open == len(group.sequences) and num_blocks <= self._blocks.swap_pool.num_available
        return fits and (self._mode == "swap" or (self._mode == "auto" and len(group.sequences) > 1))

"""Block tables of the sources of encoder-decoders: cross-attention K/V, written once and read by a whole group.

A source is a table of its own beside its group's: fork, copy-on-write and beam moves never touch it; it is swapped and
freed with the group. The prefix cache has all blocks of a source or none, the padded last one included: an encoder
sees the whole source, so that a common beginning of two sources has different K/V in each.
"""

from __future__ import annotations

from pagedbatch.engine.block_manager import BlockManager
from pagedbatch.engine.prefix_cache import CachedBlock
from pagedbatch.engine.step_builder import StepBuilder
from pagedbatch.sequence import SequenceGroup, Source

#: Fills the last block of a source in the prefix cache; no token has this id.
_PADDING = -1


class SourceTables:
    """Creates, finds and frees the tables of sources. Groups without a source pass through."""

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks

    def root_of_sequences(self, group: SequenceGroup) -> int:
        """Where the prefix chain of a group's own tokens starts: their K/V depend on the source."""
        root = self._blocks.root_of(group.arrival)
        return root if group.source is None else hash((self._root(group, group.source), _PADDING))

    def open_ids(self, group: SequenceGroup) -> list[int]:
        """The id of the group's source, if it has a table."""
        source = group.source
        return [source.seq_id] if source is not None and self._blocks.has_table(source.seq_id) else []

    def blocks_of(self, group: SequenceGroup) -> list[int]:
        """The blocks of a running group's source."""
        return [] if group.source is None else self._blocks.block_table(group.source.seq_id)

    def num_tokens_to_encode(self, group: SequenceGroup) -> int:
        """Tokens of a waiting group's source whose K/V are not in the pool."""
        source = group.source
        return 0 if source is None or self._find(group, source) else len(source.token_ids)

    def blocks_to_create(self, group: SequenceGroup) -> int:
        """Available blocks that the table of a waiting group's source takes."""
        source = group.source
        if source is None:
            return 0
        found = self._find(group, source)
        return self._blocks.available_cost(found) if found else -(-len(source.token_ids) // self._blocks.block_size)

    def create(self, group: SequenceGroup, source: Source) -> bool:
        """Gives a source its blocks, for which there is room. True if its K/V are in them already."""
        found = self._find(group, source)
        self._blocks.create_source_table(source.seq_id, self._root(group, source), found)
        if not found:
            self._blocks.extend(source.seq_id, 0, len(source.token_ids))
        source.is_encoded = bool(found)
        return source.is_encoded

    def read(self, group: SequenceGroup, seq_index: int, builder: StepBuilder) -> None:
        """The scheduled sequence `seq_index` of a group reads its source. The first one has it encoded."""
        source = group.source
        if source is None:
            return
        if not source.is_encoded:
            padded = self._padded(source)
            self._blocks.cache_full_blocks(source.seq_id, len(padded), lambda start, stop: padded[start:stop])
        builder.read_source(seq_index, source, self._blocks.block_table(source.seq_id))

    def free(self, group: SequenceGroup) -> None:
        """Gives back the blocks of a group's source, if it has any."""
        for source_id in self.open_ids(group):
            self._blocks.free(source_id)

    def _find(self, group: SequenceGroup, source: Source) -> list[CachedBlock]:
        """The blocks of a whole source that is in the pool already; none if any is missing."""
        padded = self._padded(source)
        found = self._blocks.match_prefix(self._root(group, source), [*padded, _PADDING])
        return found if len(found) * self._blocks.block_size == len(padded) else []

    def _root(self, group: SequenceGroup, source: Source) -> int:
        return hash((self._blocks.root_of(group.arrival), *source.token_ids))

    def _padded(self, source: Source) -> list[int]:
        return source.token_ids + [_PADDING] * (-len(source.token_ids) % self._blocks.block_size)

"""The block table of a sequence or of a source: plain state, changed by the block manager alone."""

from __future__ import annotations

from pagedbatch.engine.prefix_cache import CachedBlock

#: Stands in a table where a block was dropped, because its tokens have left every attention window.
NO_BLOCK = -1


class BlockTable:
    """A sequence's block ids in order, and the cache entries of its leading full blocks.

    The first `num_dropped` blocks are gone: they hold `NO_BLOCK`. `num_source_blocks` are read beside its own; they
    belong to the table of a source, which `is_source`.
    """

    __slots__ = ("blocks", "cacheable", "entries", "is_source", "num_dropped", "num_source_blocks", "root")

    def __init__(self, root: int, *, num_source_blocks: int = 0, is_source: bool = False) -> None:
        self.root = root
        self.num_source_blocks = num_source_blocks
        self.is_source = is_source
        self.num_dropped = 0
        self.blocks: list[int] = []
        self.entries: list[CachedBlock] = []
        self.cacheable = True

    @property
    def chain_hash(self) -> int:
        return self.entries[-1].chain_hash if self.entries else self.root

    @property
    def owned(self) -> list[int]:
        """The blocks that are there, in order."""
        return self.blocks[self.num_dropped :] if self.num_dropped else self.blocks

    @property
    def num_logical(self) -> int:
        """Blocks that a pool without sharing would hold for it: each reader of a source would have its own."""
        return 0 if self.is_source else len(self.owned) + self.num_source_blocks

    def copy(self) -> BlockTable:
        return self.moved(self.owned)

    def moved(self, owned: list[int]) -> BlockTable:
        """The same contents in other blocks."""
        twin = BlockTable(self.root, num_source_blocks=self.num_source_blocks, is_source=self.is_source)
        twin.num_dropped = self.num_dropped
        twin.blocks = [NO_BLOCK] * self.num_dropped + owned
        twin.entries, twin.cacheable = list(self.entries), self.cacheable
        return twin

"""Which block holds which tokens after which prefix.

Only full blocks are cached. A block's key chains over everything before it, so that equal keys mean equal prefixes;
the block's own tokens are compared on every hit.
"""

from __future__ import annotations


class CachedBlock:
    """The contents of one full block. `block_id` is None once they were evicted."""

    __slots__ = ("block_id", "chain_hash", "parent_hash", "tokens")

    def __init__(self, chain_hash: int, parent_hash: int, tokens: tuple[int, ...], block_id: int) -> None:
        self.chain_hash = chain_hash
        self.parent_hash = parent_hash
        self.tokens = tokens
        self.block_id: int | None = block_id


class PrefixCache:
    """Maps (prefix, tokens of one block) to the block that holds their K/V."""

    #: The chain of a prefix that may be shared between requests starts here.
    ROOT = 0

    def __init__(self) -> None:
        self._by_hash: dict[int, CachedBlock] = {}
        self._by_block: dict[int, CachedBlock] = {}

    def __len__(self) -> int:
        return len(self._by_block)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._by_block

    def find(self, parent_hash: int, tokens: tuple[int, ...]) -> CachedBlock | None:
        """The entry of the block that holds `tokens` after the prefix `parent_hash`, if the pool has one."""
        entry = self._by_hash.get(hash((parent_hash, tokens)))
        if entry is None or entry.parent_hash != parent_hash or entry.tokens != tokens:
            return None
        return entry

    def insert(self, parent_hash: int, tokens: tuple[int, ...], block_id: int) -> CachedBlock | None:
        """The entry for these contents: the existing one if another block already holds them, else a new one.

        None when other contents have the same hash: nothing after this prefix can then be cached.
        """
        chain_hash = hash((parent_hash, tokens))
        existing = self._by_hash.get(chain_hash)
        if existing is not None:
            return existing if existing.parent_hash == parent_hash and existing.tokens == tokens else None
        entry = CachedBlock(chain_hash, parent_hash, tokens, block_id)
        self._by_hash[chain_hash] = entry
        self._by_block[block_id] = entry
        return entry

    def clear(self) -> None:
        """Forgets what every block holds."""
        for entry in self._by_block.values():
            entry.block_id = None
        self._by_block.clear()
        self._by_hash.clear()

    def evict(self, block_id: int) -> None:
        """Forgets what a block holds; unknown ids are fine."""
        entry = self._by_block.pop(block_id, None)
        if entry is not None:
            del self._by_hash[entry.chain_hash]
            entry.block_id = None

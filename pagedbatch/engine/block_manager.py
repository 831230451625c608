"""Block tables: which blocks each sequence owns, on the device or swapped to the host, and who shares them.

Token ids only serve to recognise equal prefixes. Methods either ask (and change nothing) or act.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from pagedbatch.engine.block_pool import BlockPool
from pagedbatch.engine.block_table import NO_BLOCK, BlockTable
from pagedbatch.engine.prefix_cache import CachedBlock, PrefixCache
from pagedbatch.errors import BlockAccountingError
from pagedbatch.outputs import PoolCounts
from pagedbatch.step import BlockCopy

#: Gives the token ids [start, stop) of a sequence.
TokenSlice = Callable[[int, int], list[int]]


class BlockManager:
    """The device pool, the host pool for swapping, and every sequence's table.

    Full blocks are registered under their contents. With `prefix_cache`, any request may share them and they outlive
    their owners; without it each group has a root of its own, so that only siblings find each other's blocks (which is
    how recomputation restores their sharing) and nothing outlives its owners.
    """

    def __init__(
        self, num_blocks: int, block_size: int, num_swap_blocks: int = 0, *, prefix_cache: bool = True
    ) -> None:
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self._cache = PrefixCache()
        self.pool = BlockPool(num_blocks, on_evict=self._cache.evict)
        self.swap_pool = BlockPool(num_swap_blocks)
        self._tables: dict[int, BlockTable] = {}
        self._swapped: dict[int, BlockTable] = {}
        self._filled = [0] * num_blocks
        self._filled_slots = 0
        self._logical_blocks = 0

    # --- ask -----------------------------------------------------------------------------------------------------

    def block_table(self, seq_id: int) -> list[int]:
        """The manager's own list of block ids, some `NO_BLOCK`: read it now, don't keep or change it."""
        return self._tables[seq_id].blocks

    def has_table(self, seq_id: int) -> bool:
        return seq_id in self._tables

    def root_of(self, group_key: int) -> int:
        """Where the prefix chain of a group starts."""
        return PrefixCache.ROOT if self.prefix_cache else group_key + 1

    def match_prefix(self, root: int, token_ids: list[int]) -> list[CachedBlock]:
        """The longest run of cached or live blocks that begin `token_ids`, leaving at least one token to compute."""
        matched: list[CachedBlock] = []
        parent_hash = root
        for end in range(self.block_size, len(token_ids), self.block_size):
            entry = self._cache.find(parent_hash, tuple(token_ids[end - self.block_size : end]))
            if entry is None:
                break
            matched.append(entry)
            parent_hash = entry.chain_hash
        return matched

    def available_cost(self, entries: Iterable[CachedBlock]) -> int:
        """How many available blocks sharing these entries takes away: those that are cached and not live."""
        return sum(e.block_id is not None and self.pool.ref_count[e.block_id] == 0 for e in entries)

    def blocks_needed(self, growth: Iterable[tuple[int, int, int]]) -> int:
        """New blocks that a group needs so that each (seq_id, start, stop) can write its tokens [start, stop).

        Counts the copy-on-write copies: a half-full last block is copied once a writer but the last.
        """
        needed = 0
        writers: dict[int, int] = {}
        for seq_id, start, stop in growth:
            blocks = self._tables[seq_id].blocks
            needed += max(0, -(-stop // self.block_size) - len(blocks))
            if start % self.block_size and self.pool.ref_count[blocks[-1]] > 1:
                writers[blocks[-1]] = writers.get(blocks[-1], 0) + 1
        for block_id, count in writers.items():
            needed += min(count, self.pool.ref_count[block_id] - 1)
        return needed

    def num_distinct_blocks(self, seq_ids: list[int]) -> int:
        return len(self._distinct(self._tables, seq_ids))

    def swap_in_cost(self, seq_ids: list[int]) -> int:
        """How many available device blocks bringing these sequences back takes."""
        cost = 0
        for entry in self._distinct(self._swapped, seq_ids).values():
            is_live = entry is not None and entry.block_id is not None and self.pool.ref_count[entry.block_id] > 0
            cost += not is_live
        return cost

    def counts(self) -> PoolCounts:
        pool = self.pool
        return PoolCounts(
            private=pool.num_private,
            shared=pool.num_shared,
            cached=pool.num_cached,
            free=pool.num_free,
            logical=self._logical_blocks,
            filled_slots=self._filled_slots,
            swapped=self.swap_pool.num_live,
        )

    # --- act -----------------------------------------------------------------------------------------------------

    def create_table(self, seq_id: int, root: int, prefix: list[CachedBlock], source_id: int | None = None) -> None:
        """Gives a new sequence, which reads the source `source_id`, a table that begins with the blocks of `prefix`."""
        num_source_blocks = 0 if source_id is None else len(self._tables[source_id].blocks)
        self._create(seq_id, BlockTable(root, num_source_blocks=num_source_blocks), prefix)

    def create_source_table(self, source_id: int, root: int, prefix: list[CachedBlock]) -> None:
        """Gives a source a table that begins with the blocks of `prefix`."""
        self._create(source_id, BlockTable(root, is_source=True), prefix)

    def _create(self, seq_id: int, table: BlockTable, prefix: list[CachedBlock]) -> None:
        for entry in prefix:
            assert entry.block_id is not None
            self._touch(entry.block_id)
            table.blocks.append(entry.block_id)
            table.entries.append(entry)
        self._tables[seq_id] = table
        self._logical_blocks += table.num_logical

    def extend(self, seq_id: int, start: int, stop: int) -> BlockCopy | None:
        """Makes room to write tokens [start, stop): copies a shared half-full last block, then appends new blocks.

        Returns:
            The copy to make before the write, if one is needed.
        """
        table, size = self._tables[seq_id], self.block_size
        blocks = table.blocks
        copy = None
        if start % size and self.pool.ref_count[blocks[-1]] > 1:
            copy = BlockCopy(blocks[-1], self._allocate())
            self._free(copy.src)
            blocks[-1] = copy.dst
        while len(blocks) * size < stop:
            blocks.append(self._allocate())
            self._logical_blocks += not table.is_source
        for index in range(start // size, len(blocks)):
            self._fill(blocks[index], min(size, stop - index * size))
        return copy

    def drop_before(self, seq_id: int, position: int) -> None:
        """Gives up, once, the blocks that hold nothing but tokens before `position`."""
        table = self._tables[seq_id]
        for index in range(table.num_dropped, position // self.block_size):
            self._free(table.blocks[index])
            table.blocks[index] = NO_BLOCK
            table.num_dropped += 1
            self._logical_blocks -= 1

    def check_writable(self, seq_id: int, start: int) -> None:
        """No block that takes tokens from `start` on has a second owner.

        Raises:
            BlockAccountingError: one has.
        """
        blocks = self._tables[seq_id].blocks
        shared = [b for b in blocks[start // self.block_size :] if self.pool.ref_count[b] != 1]
        if shared:
            raise BlockAccountingError(f"sequence {seq_id} is about to write into shared blocks {shared}")

    def cache_full_blocks(self, seq_id: int, num_tokens: int, token_slice: TokenSlice) -> None:
        """Makes the blocks that the first `num_tokens` tokens fill findable under their contents.

        Called when the step that fills them is scheduled, not after it ran: a step writes all K/V of a layer before
        any token attends in it, so that a later sequence of the same step can share them already.
        """
        table = self._tables[seq_id]
        size = self.block_size
        first, stop = len(table.entries), num_tokens // size
        if first >= stop or not table.cacheable:
            return
        tokens = token_slice(first * size, stop * size)
        for index in range(first, stop):
            start = (index - first) * size
            entry = self._cache.insert(table.chain_hash, tuple(tokens[start : start + size]), table.blocks[index])
            if entry is None:
                table.cacheable = False
                return
            table.entries.append(entry)

    def fork(self, parent_id: int, child_id: int) -> None:
        """The child takes the parent's table: every block gets one more owner, nothing is copied."""
        table = self._tables[parent_id].copy()
        for block_id in table.owned:
            self.pool.touch(block_id)
        self._tables[child_id] = table
        self._logical_blocks += table.num_logical

    def is_whole(self, seq_id: int) -> bool:
        """Whether no block of the sequence was dropped."""
        return self._tables[seq_id].num_dropped == 0

    def transfer_table(self, seq_id: int, new_id: int, num_tokens: int) -> None:
        """A waiting sample takes the table of a sequence that is whole, cut back to its first `num_tokens` tokens."""
        table = self._tables.pop(seq_id)
        num_kept = -(-num_tokens // self.block_size)
        for block_id in reversed(table.blocks[num_kept:]):
            self._free(block_id)
            self._logical_blocks -= 1
        del table.blocks[num_kept:], table.entries[num_tokens // self.block_size :]
        if num_tokens % self.block_size and self.pool.ref_count[table.blocks[-1]] == 1:
            self._cache.evict(table.blocks[-1])  # what it holds behind `num_tokens` will be overwritten
            self._fill(table.blocks[-1], num_tokens % self.block_size)
        self._tables[new_id] = table

    def replace_with_fork(self, parent_id: int, child_id: int, dead_id: int) -> None:
        """Forks a parent and frees a dead sibling of it: only blocks that one of the two has change owners.

        Siblings have most blocks in common, so that a beam step costs what they wrote since they parted, not their
        whole length.
        """
        child, dead = self._tables[parent_id].copy(), self._tables[dead_id]
        common = min(len(child.blocks), len(dead.blocks))
        while common and child.blocks[common - 1] != dead.blocks[common - 1]:
            common -= 1
        if child.num_dropped != dead.num_dropped or child.blocks[:common] != dead.blocks[:common]:
            self.fork(parent_id, child_id)
            self.free(dead_id)
            return
        for block_id in child.blocks[common:]:
            self.pool.touch(block_id)
        for block_id in reversed(dead.blocks[common:]):
            self._free(block_id)
        del self._tables[dead_id]
        self._tables[child_id] = child
        self._logical_blocks += len(child.blocks) - len(dead.blocks)

    def free(self, seq_id: int) -> None:
        """Gives back the blocks of a sequence, last first, so that a cached prefix outlives its continuations."""
        table = self._tables.pop(seq_id)
        self._logical_blocks -= table.num_logical
        for block_id in reversed(table.owned):
            self._free(block_id)

    def free_swapped(self, seq_id: int) -> None:
        """Gives back the host blocks of a sequence, as if it had never been swapped out."""
        for host in self._swapped.pop(seq_id).owned:
            self.swap_pool.free(host)

    def forget_contents(self) -> None:
        """From now on no block is found by its contents as they are now."""
        self._cache.clear()
        self.pool.release_cached()

    def swap_out(self, seq_ids: list[int]) -> list[BlockCopy]:
        """Moves the tables of a group to the host pool, its sharing kept. Copies go from device to host block ids."""
        moved = {block_id: self.swap_pool.allocate() for block_id in self._distinct(self._tables, seq_ids)}
        first = set(moved)
        for seq_id in seq_ids:
            table = self._tables[seq_id]
            twin = table.moved([moved[block_id] for block_id in table.owned])
            self._take_all(self.swap_pool, table.owned, twin.owned, first)
            self.free(seq_id)
            self._swapped[seq_id] = twin
        return [BlockCopy(device, host) for device, host in moved.items()]

    def swap_in(self, num_tokens: dict[int, int]) -> list[BlockCopy]:
        """Brings a group back: `num_tokens` says how many tokens each of its sequences holds.

        Blocks whose contents are still in the pool are shared instead of copied.
        """
        moved: dict[int, int] = {}
        copies: list[BlockCopy] = []
        distinct = self._distinct(self._swapped, list(num_tokens))
        # Blocks that are still there are taken before anything is allocated, which could evict them.
        for host, entry in distinct.items():
            if entry is not None and entry.block_id is not None:
                self._touch(entry.block_id)
                moved[host] = entry.block_id
        for host in distinct:
            if host not in moved:
                moved[host] = self._allocate()
                copies.append(BlockCopy(host, moved[host]))
        first = set(distinct)
        for seq_id, length in num_tokens.items():
            table = self._swapped.pop(seq_id)
            twin = table.moved([moved[host] for host in table.owned])
            self._take_all(self.pool, table.owned, twin.owned, first)
            for host in table.owned:
                self.swap_pool.free(host)
            self._tables[seq_id] = twin
            self._logical_blocks += twin.num_logical
            for index, block_id in enumerate(twin.owned, start=twin.num_dropped):
                self._fill(block_id, min(self.block_size, length - index * self.block_size))
        return copies

    # --- inside --------------------------------------------------------------------------------------------------

    def _allocate(self) -> int:
        block_id = self.pool.allocate()
        self._filled[block_id] = 0
        return block_id

    def _touch(self, block_id: int) -> None:
        if self.pool.ref_count[block_id] == 0:
            self._filled_slots += self._filled[block_id]
        self.pool.touch(block_id)

    def _free(self, block_id: int) -> None:
        keep = self.prefix_cache and block_id in self._cache
        if self.pool.free(block_id, keep_cached=keep):
            self._filled_slots -= self._filled[block_id]
            if not keep:
                self._cache.evict(block_id)

    def _fill(self, block_id: int, slots: int) -> None:
        self._filled_slots += slots - self._filled[block_id]
        self._filled[block_id] = slots

    @staticmethod
    def _distinct(tables: dict[int, BlockTable], seq_ids: list[int]) -> dict[int, CachedBlock | None]:
        """Each block of a group once, with its cache entry where it has one."""
        found: dict[int, CachedBlock | None] = {}
        for seq_id in seq_ids:
            table = tables[seq_id]
            for index, block_id in enumerate(table.owned, start=table.num_dropped):
                entry = table.entries[index] if index < len(table.entries) else None
                found[block_id] = entry or found.get(block_id)
        return found

    @staticmethod
    def _take_all(pool: BlockPool, old_blocks: list[int], new_blocks: list[int], first: set[int]) -> None:
        """One reference a table for each block; the reference made with the block serves its first owner."""
        for old, new in zip(old_blocks, new_blocks, strict=True):
            if old in first:
                first.discard(old)
            else:
                pool.touch(new)

    def check_integrity(self) -> None:
        """Recounts everything that is kept incrementally.

        Raises:
            BlockAccountingError: tables and pools disagree.
        """
        self.pool.check_integrity()
        self.swap_pool.check_integrity()
        for pool, tables in ((self.pool, self._tables), (self.swap_pool, self._swapped)):
            owners = Counter(block_id for table in tables.values() for block_id in table.owned)
            if any(owners[block_id] != count for block_id, count in enumerate(pool.ref_count)):
                raise BlockAccountingError(f"ref counts of a pool of {pool.num_blocks} blocks differ from its tables")
        logical = sum(table.num_logical for table in self._tables.values())
        filled = sum(self._filled[b] for b, count in enumerate(self.pool.ref_count) if count)
        if logical != self._logical_blocks or filled != self._filled_slots:
            raise BlockAccountingError(
                f"counted {self._logical_blocks} logical blocks and {self._filled_slots} filled slots, "
                f"found {logical} and {filled}"
            )

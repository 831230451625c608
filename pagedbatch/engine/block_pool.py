"""The blocks of one memory: who is free, live or cached, and how often each is referenced.

Every operation is O(1); the counts never need a scan.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from pagedbatch.errors import BlockAccountingError


class BlockPool:
    """`num_blocks` blocks, each in exactly one state.

    - free: `ref_count` 0, contents worthless;
    - live: `ref_count` > 0, private at 1 and shared above;
    - cached: `ref_count` 0, contents reusable until the block is needed (least recently used goes first).

    `on_evict(block_id)` is called when a cached block loses its contents to a new owner.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None] | None = None) -> None:
        self.num_blocks = num_blocks
        self.ref_count = [0] * num_blocks
        self.num_shared = 0
        # Lowest ids first: a run that needs few blocks touches little memory.
        self._free = list(range(num_blocks - 1, -1, -1))
        # In the order of release. A plain dict finds its first key by going over all that were deleted before it.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._on_evict = on_evict

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can still hand out."""
        return len(self._free) + len(self._cached)

    @property
    def num_live(self) -> int:
        return self.num_blocks - self.num_available

    @property
    def num_private(self) -> int:
        return self.num_live - self.num_shared

    def allocate(self) -> int:
        """A block with `ref_count` 1 and worthless contents.

        Raises:
            BlockAccountingError: none is available; callers ask `num_available` first.
        """
        if self._free:
            block_id = self._free.pop()
        elif self._cached:
            block_id, _ = self._cached.popitem(last=False)
            if self._on_evict is not None:
                self._on_evict(block_id)
        else:
            raise BlockAccountingError(f"all {self.num_blocks} blocks are live: none can be allocated")
        self.ref_count[block_id] = 1
        return block_id

    def touch(self, block_id: int) -> None:
        """One more owner for a live block, or the first one again for a cached block."""
        count = self.ref_count[block_id]
        if count == 0:
            if block_id not in self._cached:
                raise BlockAccountingError(f"block {block_id} is free and can't be shared")
            del self._cached[block_id]
        elif count == 1:
            self.num_shared += 1
        self.ref_count[block_id] = count + 1

    def free(self, block_id: int, *, keep_cached: bool = False) -> bool:
        """One owner less. True when it was the last one.

        The block then becomes cached if `keep_cached`, else free.

        Raises:
            BlockAccountingError: the block has no owner (double free).
        """
        count = self.ref_count[block_id]
        if count == 0:
            raise BlockAccountingError(f"block {block_id} was freed twice")
        self.ref_count[block_id] = count - 1
        if count == 2:
            self.num_shared -= 1
        if count > 1:
            return False
        if keep_cached:
            self._cached[block_id] = None
        else:
            self._free.append(block_id)
        return True

    def release_cached(self) -> None:
        """Makes every cached block free."""
        self._free.extend(reversed(self._cached))
        self._cached.clear()

    def check_integrity(self) -> None:
        """Every block is in exactly one state and the counts agree.

        Raises:
            BlockAccountingError: they don't.
        """
        live = [block_id for block_id, count in enumerate(self.ref_count) if count > 0]
        shared = sum(count > 1 for count in self.ref_count)
        if sorted([*self._free, *self._cached, *live]) != list(range(self.num_blocks)) or shared != self.num_shared:
            raise BlockAccountingError(
                f"pool of {self.num_blocks} is inconsistent: {len(self._free)} free, {len(self._cached)} cached, "
                f"{len(live)} live, {shared} shared (counted {self.num_shared})"
            )

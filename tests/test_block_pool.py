"""Blocks of one memory: three states, reference counts, and the order in which cached contents are given up."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedbatch.engine.block_pool import BlockPool
from pagedbatch.errors import BlockAccountingError


def counts(pool: BlockPool) -> tuple[int, int, int, int]:
    return pool.num_private, pool.num_shared, pool.num_cached, pool.num_free


def test_the_states_of_a_block() -> None:
    pool = BlockPool(3)
    assert counts(pool) == (0, 0, 0, 3)
    block = pool.allocate()
    assert counts(pool) == (1, 0, 0, 2)
    pool.touch(block)
    pool.touch(block)
    assert counts(pool) == (0, 1, 0, 2)
    assert (pool.free(block), pool.free(block)) == (False, False)
    assert counts(pool) == (1, 0, 0, 2)
    assert pool.free(block, keep_cached=True)
    assert counts(pool) == (0, 0, 1, 2)
    pool.touch(block)
    assert counts(pool) == (1, 0, 0, 2)
    assert pool.free(block)
    assert counts(pool) == (0, 0, 0, 3)


def test_lowest_ids_first() -> None:
    pool = BlockPool(3)
    assert [pool.allocate() for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("keep_cached", [True, False])
def test_a_double_free_raises(keep_cached: bool) -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.free(block, keep_cached=keep_cached)
    with pytest.raises(BlockAccountingError, match="block 0 was freed twice"):
        pool.free(block)
    pool.check_integrity()


def test_a_free_block_cannot_be_shared() -> None:
    pool = BlockPool(2)
    pool.free(pool.allocate())
    for block in range(2):
        with pytest.raises(BlockAccountingError, match=f"block {block} is free"):
            pool.touch(block)


def test_released_blocks_are_free_and_come_back_in_the_order_of_their_release() -> None:
    pool = BlockPool(4)
    blocks = [pool.allocate() for _ in range(4)]
    for block in (2, 0, 1):
        pool.free(blocks[block], keep_cached=True)
    pool.release_cached()
    assert counts(pool) == (1, 0, 0, 3)
    pool.check_integrity()
    assert [pool.allocate() for _ in range(3)] == [2, 0, 1]


@pytest.mark.parametrize(
    ("free", "cached", "ref_count"),
    [
        ([2, 3], [1], [1, 0, 0, 0]),
        ([2, 3, 3], [1], [1, 0, 0, 0]),
        ([2], [1], [1, 0, 0, 0]),
        ([2, 3], [1, 3], [1, 0, 0, 0]),
        ([2, 3], [1], [1, 0, 1, 0]),
        ([2, 3], [1], [1, 1, 0, 0]),
        ([2, 3], [1], [2, 0, 0, 0]),
        ([2, 2], [1], [1, 0, 0, 0]),
        ([2, 0], [1], [1, 0, 0, 0]),
        ([2, 1], [1], [1, 0, 0, 0]),
        ([2, 3], [0], [1, 0, 0, 0]),
    ],
    ids=str,
)
def test_a_block_in_two_states_or_none_is_found(free: list[int], cached: list[int], ref_count: list[int]) -> None:
    """The first pool is whole; in the last ones the number of entries is right."""
    pool = BlockPool(4)
    pool._free, pool._cached, pool.ref_count = free, OrderedDict.fromkeys(cached), ref_count
    if (free, cached, ref_count) == ([2, 3], [1], [1, 0, 0, 0]):
        pool.check_integrity()
    else:
        with pytest.raises(BlockAccountingError, match="pool of 4 is inconsistent"):
            pool.check_integrity()


def test_an_empty_pool_raises() -> None:
    pool = BlockPool(1)
    pool.allocate()
    with pytest.raises(BlockAccountingError, match="all 1 blocks are live"):
        pool.allocate()


def test_cached_blocks_go_last_and_the_longest_unused_goes_first() -> None:
    evicted: list[int] = []
    pool = BlockPool(4, on_evict=evicted.append)
    for _ in range(3):
        pool.allocate()
    for block in (1, 0, 2):
        pool.free(block, keep_cached=True)
    pool.touch(1)
    pool.free(1, keep_cached=True)  # used again: now the youngest
    assert pool.num_available == 4
    assert [pool.allocate() for _ in range(4)] == [3, 0, 2, 1]
    assert evicted == [0, 2, 1]


@pytest.mark.parametrize("damage", ["lost", "owned and free", "shared count", "free twice", "cached and free"])
def test_the_integrity_check_notices_damage(damage: str) -> None:
    pool = BlockPool(3)
    block = pool.allocate()
    pool.check_integrity()
    if damage == "lost":
        pool.ref_count[block] = 0
    elif damage == "owned and free":
        pool.ref_count[1] = 1
    elif damage == "shared count":
        pool.ref_count[block] = 2
    elif damage == "free twice":
        pool._free.append(1)
    else:
        pool._cached[1] = None
    with pytest.raises(BlockAccountingError, match="pool of 3 is inconsistent"):
        pool.check_integrity()


@given(st.lists(st.tuples(st.sampled_from(["allocate", "touch", "free", "cache"]), st.integers(0, 4))))
def test_random_operations_against_a_recount(operations: list[tuple[str, int]]) -> None:
    evicted: list[int] = []
    pool = BlockPool(5, on_evict=evicted.append)
    owners = [0] * 5
    cached: list[int] = []  # the longest unused first
    for name, block in operations:
        evicted.clear()
        if name == "allocate":
            if all(owners):
                with pytest.raises(BlockAccountingError):
                    pool.allocate()
                continue
            someone_is_free = any(not count and each not in cached for each, count in enumerate(owners))
            block = pool.allocate()
            assert owners[block] == 0
            assert evicted == ([] if someone_is_free else cached[:1])
            owners[block] = 1
            cached = [each for each in cached if each != block]
        elif name == "touch":
            if not owners[block] and block not in cached:
                with pytest.raises(BlockAccountingError):
                    pool.touch(block)
                continue
            pool.touch(block)
            owners[block] += 1
            cached = [each for each in cached if each != block]
        else:
            if not owners[block]:
                with pytest.raises(BlockAccountingError):
                    pool.free(block)
                continue
            owners[block] -= 1
            assert pool.free(block, keep_cached=name == "cache") == (owners[block] == 0)
            if not owners[block] and name == "cache":
                cached.append(block)
        pool.check_integrity()
        free = 5 - len(cached) - sum(map(bool, owners))
        assert counts(pool) == (owners.count(1), sum(count > 1 for count in owners), len(cached), free)
        assert pool.num_live == pool.num_private + pool.num_shared == sum(map(bool, owners))
        assert pool.num_available == free + len(cached)

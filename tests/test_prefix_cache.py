"""Full blocks found by their contents: the whole prefix counts, and equal hashes are not trusted."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedbatch.engine import prefix_cache
from pagedbatch.engine.prefix_cache import CachedBlock, PrefixCache

ROOT = PrefixCache.ROOT


def insert(cache: PrefixCache, parent: int, tokens: tuple[int, ...], block_id: int) -> CachedBlock:
    entry = cache.insert(parent, tokens, block_id)
    assert entry is not None
    return entry


def test_contents_are_found_under_their_own_prefix_only() -> None:
    cache = PrefixCache()
    first = insert(cache, ROOT, (1, 2), 7)
    second = insert(cache, first.chain_hash, (1, 2), 8)
    assert cache.find(ROOT, (1, 2)) is first
    assert cache.find(first.chain_hash, (1, 2)) is second
    assert cache.find(second.chain_hash, (1, 2)) is None
    assert cache.find(ROOT, (2, 1)) is None
    assert cache.find(5, (1, 2)) is None
    assert (first.block_id, second.block_id, len(cache)) == (7, 8, 2)


def test_the_block_that_came_first_stands_for_equal_contents() -> None:
    cache = PrefixCache()
    first = insert(cache, ROOT, (1, 2), 7)
    assert cache.insert(ROOT, (1, 2), 9) is first
    assert 7 in cache
    assert 9 not in cache


def test_evicted_contents_are_forgotten_and_can_come_back_in_another_block() -> None:
    cache = PrefixCache()
    first = insert(cache, ROOT, (1, 2), 7)
    second = insert(cache, first.chain_hash, (3, 4), 8)
    cache.evict(7)
    cache.evict(7)
    assert first.block_id is None
    assert cache.find(ROOT, (1, 2)) is None
    assert len(cache) == 1
    again = insert(cache, ROOT, (1, 2), 3)
    assert again.chain_hash == first.chain_hash
    assert cache.find(again.chain_hash, (3, 4)) is second  # its prefix is the same, wherever it stands


def test_equal_hashes_of_other_contents_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "hash", lambda key: 42, raising=False)
    cache = PrefixCache()
    insert(cache, ROOT, (1, 2), 7)
    assert cache.find(ROOT, (3, 4)) is None
    assert cache.find(1, (1, 2)) is None
    assert cache.insert(ROOT, (3, 4), 8) is None
    assert cache.insert(42, (1, 2), 8) is None
    assert 8 not in cache
    cache.evict(7)
    assert insert(cache, ROOT, (3, 4), 8).block_id == 8


operations = st.lists(
    st.tuples(
        st.sampled_from(["insert", "insert", "evict"]),
        st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=3),
    )
)


@settings(deadline=None)
@given(operations, st.sampled_from([3, 50, 10**6]))
def test_a_hit_is_never_wrong_however_weak_the_hash(
    operations: list[tuple[str, list[tuple[int, ...]]]], num_hashes: int
) -> None:
    """Chains are walked as the block manager does; every block found must hold what is looked for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_cache, "hash", lambda key: 100 + hash(key) % num_hashes, raising=False)
        cache = PrefixCache()
        contents: dict[int, list[tuple[int, ...]]] = {}
        for step, (name, chain) in enumerate(operations):
            parent = ROOT
            for depth in range(len(chain)):
                prefix = chain[: depth + 1]
                entry = cache.find(parent, chain[depth])
                if entry is not None:
                    assert entry.block_id is not None
                    assert contents[entry.block_id][-1] == chain[depth]
                    if num_hashes == 10**6:  # the prefix is known by its hash alone
                        assert contents[entry.block_id] == prefix
                elif name == "insert":
                    entry = cache.insert(parent, chain[depth], 10 * step + depth)
                    if entry is not None:
                        contents[10 * step + depth] = prefix
                if entry is None:
                    break
                if name == "evict" and depth == len(chain) - 1:
                    assert entry.block_id is not None
                    cache.evict(entry.block_id)
                    break
                parent = entry.chain_hash

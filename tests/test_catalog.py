"""The trie of a catalog and the states in it, against a list of items that is searched item by item."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedbatch.constraints.catalog import CatalogConstraint, CatalogState, TokenTrie, pack

ENDS = (90, 91)

Items = list[tuple[int, ...]]
#: Few tokens and short items, so that prefixes, duplicates and items inside items are frequent.
items_strategy = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=5).map(tuple), min_size=1, max_size=12)


def trie_of(items: Items) -> TokenTrie:
    return TokenTrie.build(pack(item) for item in items)


def allowed(state: CatalogState) -> list[int]:
    token_ids = state.allowed().token_ids
    assert token_ids.dtype == np.int64
    return sorted(token_ids.tolist())


def every_output(constraint: CatalogConstraint) -> Items:
    """All outputs that can be written, their end tokens left out, by going wherever the state allows."""
    found: Items = []
    standing: list[tuple[tuple[int, ...], CatalogState]] = [((), constraint.start())]
    while standing:
        written, state = standing.pop()
        assert len(set(allowed(state))) == len(allowed(state))
        for token_id in allowed(state):
            if token_id in ENDS:
                found.append(written)
                continue
            child = state.fork()
            child.advance(token_id)
            standing.append(((*written, token_id), child))
    return sorted(found)


@given(items_strategy)
def test_all_items_and_nothing_else(items: Items) -> None:
    """Each once for each end token, however often it stands in the catalog."""
    constraint = CatalogConstraint(trie_of(items), ENDS, min_tokens=0, max_tokens=100)
    assert every_output(constraint) == sorted(list(set(items)) * len(ENDS))


@given(items_strategy, st.integers(0, 6), st.integers(1, 7))
def test_limits_leave_the_items_that_fit(items: Items, min_tokens: int, max_tokens: int) -> None:
    """An item and its end token fit into `max_tokens`; no end token comes before `min_tokens` others."""
    constraint = CatalogConstraint(trie_of(items), ENDS, min_tokens, max_tokens)
    fitting = {item for item in items if min_tokens <= len(item) < max_tokens}
    assert every_output(constraint) == sorted(list(fitting) * len(ENDS))


@given(items_strategy)
def test_nothing_is_begun_that_cannot_be_completed(items: Items) -> None:
    shortest = min(map(len, items))
    trie = trie_of(items)
    assert trie.shortest_item == shortest
    assert not CatalogConstraint(trie, ENDS, 0, shortest).is_possible
    assert CatalogConstraint(trie, ENDS, 0, shortest + 1).is_possible
    assert not CatalogConstraint(trie, ENDS, max(map(len, items)) + 1, 100).is_possible


def test_a_fork_goes_on_by_itself() -> None:
    state = CatalogConstraint(trie_of([(1, 2), (1, 3, 4)]), ENDS, 0, 10).start()
    state.advance(1)
    child = state.fork()
    child.advance(3)
    assert (allowed(state), allowed(child)) == ([2, 3], [4])
    state.advance(2)
    assert (allowed(state), allowed(child)) == ([90, 91], [4])
    with pytest.raises(KeyError):
        child.advance(2)


def test_tokens_of_a_large_vocabulary() -> None:
    """Their bytes sort as their numbers do."""
    items = [(256,), (255,), (65_536, 1), (200_000, 2), (200_000, 1), (1, 200_000)]
    constraint = CatalogConstraint(trie_of(items), (2,), 0, 9)
    assert allowed(constraint.start()) == [1, 255, 256, 65_536, 200_000]
    trie = constraint.trie
    assert trie.uses_any_of([7, 65_536]) == 65_536
    assert trie.uses_any_of([0, 7]) is None
    assert trie.uses_any_of([]) is None


def test_a_large_catalog_is_small_arrays() -> None:
    """25,000 items of six codes: a node takes a few bytes, and a state two numbers."""
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 256, (25_000, 6))
    trie = TokenTrie.build(pack(row) for row in rows)
    arrays = (trie.tokens, trie.first_child, trie.is_item, trie.shortest, trie.longest)
    assert sum(array.nbytes for array in arrays) < 18 * trie.num_nodes
    assert trie.num_nodes == 1 + sum(len(np.unique(rows[:, :depth], axis=0)) for depth in range(1, 7))
    state = CatalogConstraint(trie, (300,), 0, 7).start()
    for token_id in rows[4321]:
        assert token_id in state.allowed().token_ids
        state.advance(int(token_id))
    assert allowed(state) == [300]

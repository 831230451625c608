"""A catalog of allowed outputs: a trie over token ids, and the constraint that it makes.

The trie is flat arrays, 17 bytes a node whatever its fan-out, after the CSR layout of Su et al., "Vectorizing the Trie"
(arXiv 2602.22647): a million items of three codes take tens of megabytes where nested dictionaries take gigabytes.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pagedbatch.constraint import AllowedIds

_ROOT = 0


@dataclass(frozen=True, slots=True, eq=False)
class TokenTrie:
    """Nodes in breadth-first order, siblings side by side and ordered by token. Node 0 is the root.

    `tokens` int32 [num_nodes] is the token that leads to a node (the root's means nothing); the children of node i are
    the nodes `first_child[i]` up to `first_child[i + 1]`, int32 [num_nodes + 1]. `is_item` bool [num_nodes]: an item
    ends here. `shortest` and `longest`, int32 [num_nodes], count the tokens from a node to the nearest and the furthest
    end of an item at or below it.
    """

    tokens: np.ndarray
    first_child: np.ndarray
    is_item: np.ndarray
    shortest: np.ndarray
    longest: np.ndarray

    @staticmethod
    def build(items: Iterable[bytes]) -> TokenTrie:
        """The trie of `items`, at least one, each made by `pack`. Items that come twice count once."""
        ordered = sorted(set(items))  # big-endian numbers sort as bytes do, and a prefix sorts before what it begins
        sizes = np.array([len(item) // 4 for item in ordered])
        flat = np.frombuffer(b"".join(ordered), dtype=">u4").astype(np.int32)
        begins = np.concatenate(([0], np.cumsum(sizes)[:-1]))
        levels = [1]  # number of nodes on each level
        tokens = [np.zeros(1, np.int32)]
        num_children = []
        ends_item = [np.array([bool(sizes[0] == 0)])]
        node_of = np.zeros(len(ordered), np.int64)  # of each item: its node on the level before, counted on that level
        alive = np.arange(len(ordered))  # items that reach the level, in order
        for depth in range(int(sizes.max())):
            keep = sizes[alive] > depth
            alive, parents = alive[keep], node_of[keep]
            column = flat[begins[alive] + depth]
            is_new = np.ones(len(alive), bool)
            is_new[1:] = (parents[1:] != parents[:-1]) | (column[1:] != column[:-1])
            node_of = np.cumsum(is_new) - 1
            num_children.append(np.bincount(parents[is_new], minlength=levels[-1]))
            levels.append(int(is_new.sum()))
            tokens.append(column[is_new])
            ends = np.zeros(levels[-1], bool)
            ends[node_of[sizes[alive] == depth + 1]] = True
            ends_item.append(ends)
        num_children.append(np.zeros(levels[-1], np.int64))
        first_child = 1 + np.concatenate(([0], np.cumsum(np.concatenate(num_children))))
        is_item = np.concatenate(ends_item)
        shortest, longest = _distances(levels, first_child, is_item)
        return TokenTrie(np.concatenate(tokens), first_child.astype(np.int32), is_item, shortest, longest)

    @property
    def num_nodes(self) -> int:
        return len(self.tokens)

    @property
    def shortest_item(self) -> int:
        """Tokens of the shortest item."""
        return int(self.shortest[_ROOT])

    @property
    def longest_item(self) -> int:
        """Tokens of the longest item."""
        return int(self.longest[_ROOT])

    def uses_any_of(self, token_ids: Collection[int]) -> int | None:
        """One of these tokens that an item holds, if any does."""
        if not token_ids:
            return None
        found = self.tokens[1:][np.isin(self.tokens[1:], list(token_ids))]
        return int(found[0]) if len(found) else None

    def children(self, node: int) -> slice:
        """The nodes one token further."""
        return slice(int(self.first_child[node]), int(self.first_child[node + 1]))

    def child(self, node: int, token_id: int) -> int:
        """The node that `token_id` leads to.

        Raises:
            KeyError: no item goes on with this token.
        """
        span = self.children(node)
        found: int = span.start + int(np.searchsorted(self.tokens[span], token_id))
        if found == span.stop or self.tokens[found] != token_id:
            raise KeyError(token_id)
        return found


def pack(token_ids: Sequence[int]) -> bytes:
    """An item's token ids as big-endian 32-bit numbers."""
    return struct.pack(f">{len(token_ids)}I", *token_ids)


def _distances(levels: list[int], first_child: np.ndarray, is_item: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`shortest` and `longest` of every node, from the deepest level up."""
    shortest = np.zeros(len(is_item), np.int32)
    longest = np.zeros(len(is_item), np.int32)
    borders = np.concatenate(([0], np.cumsum(levels)))
    for begin, end in reversed(list(pairwise(borders))):
        firsts = first_child[begin : end + 1]
        inner = np.flatnonzero(np.diff(firsts))
        if len(inner) == 0:
            continue
        below = slice(int(firsts[0]), int(firsts[-1]))
        starts = firsts[inner] - below.start
        nodes = begin + inner
        nearest = 1 + np.minimum.reduceat(shortest[below], starts)
        shortest[nodes] = np.where(is_item[nodes], 0, nearest)
        longest[nodes] = 1 + np.maximum.reduceat(longest[below], starts)
    return shortest, longest


@dataclass(frozen=True, slots=True)
class CatalogConstraint:
    """Every output is an item of the catalog and then one of `end_token_ids`.

    An item that begins another may end there or go on. No item is begun that can't be complete within `max_tokens`, the
    end token included, or that has no end after `min_tokens` tokens or later.
    """

    trie: TokenTrie
    end_token_ids: tuple[int, ...]
    min_tokens: int
    max_tokens: int

    def start(self) -> CatalogState:
        return CatalogState(self, _ROOT, 0)

    @property
    def is_possible(self) -> bool:
        """Whether any item can be complete in time."""
        return len(self.start().allowed().token_ids) > 0


@dataclass(slots=True)
class CatalogState:
    """A sequence's node in the trie, `length` generated tokens from the root."""

    constraint: CatalogConstraint
    node: int
    length: int

    def allowed(self) -> AllowedIds:
        constraint, trie = self.constraint, self.constraint.trie
        span = trie.children(self.node)
        after = self.length + 1  # tokens generated once a child is taken
        is_in_time = after + trie.shortest[span] < constraint.max_tokens
        is_late_enough = after + trie.longest[span] >= constraint.min_tokens
        token_ids = trie.tokens[span][is_in_time & is_late_enough].astype(np.int64)
        if trie.is_item[self.node] and constraint.min_tokens <= self.length < constraint.max_tokens:
            token_ids = np.concatenate((token_ids, np.array(constraint.end_token_ids, np.int64)))
        return AllowedIds(token_ids)

    def advance(self, token_id: int) -> None:
        self.node = self.constraint.trie.child(self.node, token_id)
        self.length += 1

    def fork(self) -> CatalogState:
        return CatalogState(self.constraint, self.node, self.length)

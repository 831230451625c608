"""Which neighbouring sequences of a batch should attend to their common prefix together.

Sequences that were forked from one prompt, or served from the prefix cache, have block tables that begin with the same
blocks. Read by each sequence, the prefix crosses the memory bus (or the cache above it) once per sequence. Read once
for all, it becomes one product of a tall query matrix with the prefix, and each sequence's tail is merged by
log-sum-exp (Juravsky et al., Hydragen, 2024; Ye et al., cascade inference, 2024). The merge and a second launch have a
price, so `PrefixCosts` compares both ways.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """`num_seqs` neighbouring sequences whose tables begin with the same `num_blocks` blocks."""

    first_seq: int
    num_seqs: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class PrefixCosts:
    """What reading and merging cost, in units of reading one token's K and V of one KV head.

    A plain pass reads a sequence's prefix once per query tile, the shared pass once per tile of the whole group. Most
    reads that are saved would have hit a cache, hence `reread`. Sharing costs the partial results of every query token
    of the batch, which are written and read again, and the launches.
    """

    queries_per_kv: int
    plain_tile: int  #: query rows (tokens x queries_per_kv) per tile in the plain pass
    shared_tile: int  #: the same in the shared pass
    reread: float  #: cost of one more read of a prefix, relative to a read from memory
    merge: float  #: per query token
    launch: float  #: per layer

    def tiles(self, num_tokens: int, tile: int) -> int:
        return -(-num_tokens * self.queries_per_kv // tile)

    def overhead(self, num_tokens: int) -> float:
        """Cost of sharing for a batch of `num_tokens` query tokens, however much is shared."""
        return self.merge * num_tokens + self.launch


def find_prefix_groups(
    block_tables: Sequence[Sequence[int]],
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    block_size: int,
    costs: PrefixCosts,
) -> tuple[PrefixGroup, ...]:
    """The groups worth sharing, disjoint and in order; none if the plain pass is as good.

    Only whole blocks from before this step can be shared, so that every query sees the whole prefix. Of nested prefixes
    (a system prompt, and within it the samples of one prompt) the better one is chosen; a sequence shares one prefix.

    Args:
        block_tables: each sequence's block ids in order; only neighbours are compared.
        query_lens: each sequence's tokens in this step.
        context_lens: each sequence's tokens before this step.
    """
    limits = [context_len // block_size for context_len in context_lens]
    common = [
        _common_blocks(block_tables[i], block_tables[i + 1], min(limits[i], limits[i + 1]))
        for i in range(len(limits) - 1)
    ]
    if not any(common):
        return ()
    common.append(0)  # closes every run that is still open after the last sequence

    chosen = _Choice()
    runs: list[_OpenRun] = []  # nested, num_blocks strictly growing
    for i, blocks in enumerate(common):
        first_seq = i
        best = _Choice()
        while runs and runs[-1].num_blocks > blocks:
            run = runs.pop()
            run.inner.add(best)
            first_seq = run.first_seq

            def group_of(first: int, end: int, num_blocks: int = run.num_blocks) -> _Choice:
                gain = _gain(query_lens[first:end], num_blocks * block_size, costs)
                return _Choice(gain, [PrefixGroup(first, end - first, num_blocks)])

            # The best groups within this run with the gaps between them filled, or the whole run as one group.
            best = max(_fill_gaps(run.inner, first_seq, i + 1, group_of), group_of(first_seq, i + 1), key=_by_gain)
        if not blocks:
            chosen.add(best)
        elif runs and runs[-1].num_blocks == blocks:
            runs[-1].inner.add(best)
        else:
            runs.append(_OpenRun(first_seq, blocks, best))
    return tuple(chosen.groups) if chosen.gain > costs.overhead(sum(query_lens)) else ()


@dataclass(slots=True)
class _Choice:
    """Disjoint groups and the cost that they save."""

    gain: float = 0.0
    groups: list[PrefixGroup] = field(default_factory=list)

    def add(self, other: _Choice) -> None:
        self.gain += other.gain
        self.groups += other.groups


@dataclass(slots=True)
class _OpenRun:
    """Sequences from `first_seq` on that share `num_blocks` blocks, and the best choice within them so far."""

    first_seq: int
    num_blocks: int
    inner: _Choice


def _fill_gaps(choice: _Choice, first_seq: int, end_seq: int, group_of: Callable[[int, int], _Choice]) -> _Choice:
    """`choice`, and a group for each gap in [first_seq, end_seq) that it leaves, if that saves anything."""
    filled = _Choice()
    next_seq = first_seq
    for group in [*choice.groups, PrefixGroup(end_seq, 0, 0)]:
        between = group_of(next_seq, group.first_seq)
        if between.gain > 0:
            filled.add(between)
        if group.num_seqs:
            filled.groups.append(group)
        next_seq = group.first_seq + group.num_seqs
    filled.gain += choice.gain
    return filled


def _by_gain(choice: _Choice) -> float:
    return choice.gain


def _gain(query_lens: Sequence[int], prefix_len: int, costs: PrefixCosts) -> float:
    plain_tiles = sum(costs.tiles(query_len, costs.plain_tile) for query_len in query_lens)
    return costs.reread * prefix_len * (plain_tiles - costs.tiles(sum(query_lens), costs.shared_tile))


def _common_blocks(one: Sequence[int], other: Sequence[int], limit: int) -> int:
    """Length of the common prefix, at most `limit`; compares slices, since a Python loop over block ids is too slow."""
    limit = min(limit, len(one), len(other))
    if limit == 0 or one[0] != other[0]:
        return 0
    if one[:limit] == other[:limit]:
        return limit
    return bisect_left(range(1, limit), True, key=lambda length: one[: length + 1] != other[: length + 1]) + 1

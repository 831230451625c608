"""Shared prefixes: which neighbours share one, and whether it pays."""

from __future__ import annotations

from itertools import groupby

import torch
from hypothesis import given
from hypothesis import strategies as st
from pagedbatch_kernels.interface import SharedPrefixes
from pagedbatch_kernels.prefix_groups import PrefixCosts, PrefixGroup, find_prefix_groups

#: Every read saved counts fully, nothing else costs.
FREE = PrefixCosts(queries_per_kv=1, plain_tile=16, shared_tile=64, reread=1.0, merge=0.0, launch=0.0)
#: The shape of Qwen3-0.6B on an H100: 16 query heads on 8 KV heads of 128, bfloat16.
H100 = PrefixCosts(queries_per_kv=2, plain_tile=16, shared_tile=64, reread=0.3, merge=8.0, launch=7813.0)


def forked(num_seqs: int, prefix_blocks: int, *, first_block: int = 0) -> list[list[int]]:
    prefix = list(range(first_block, first_block + prefix_blocks))
    return [[*prefix, 10_000 + first_block + i] for i in range(num_seqs)]


def decoding(tables: list[list[int]], costs: PrefixCosts, block_size: int = 16) -> tuple[PrefixGroup, ...]:
    """The groups when each sequence decodes one token into its last, half-filled block."""
    context_lens = [(len(table) - 1) * block_size + block_size // 2 for table in tables]
    return find_prefix_groups(tables, [1] * len(tables), context_lens, block_size, costs)


def test_sequences_of_one_prompt_form_a_group() -> None:
    tables = [*forked(3, 4), [500, 501], *forked(2, 7, first_block=100)]
    assert decoding(tables, FREE) == (PrefixGroup(0, 3, 4), PrefixGroup(4, 2, 7))


def test_equal_blocks_behind_a_difference_are_no_prefix() -> None:
    assert decoding([[1, 2, 3, 4], [1, 9, 3, 5]], FREE) == (PrefixGroup(0, 2, 1),)
    assert decoding([[1, 2, 3], [9, 2, 3]], FREE) == ()


def test_the_better_level_of_nested_prefixes_is_taken() -> None:
    system = [1, 2]
    one = [[*system, 10, 11, 12, 13, 20 + i] for i in range(4)]
    other = [[*system, 30, 31, 32, 33, 40 + i] for i in range(4)]
    # Two groups save 2 * 3 * 6 blocks, one group over all 7 * 2.
    assert decoding(one + other, FREE) == (PrefixGroup(0, 4, 6), PrefixGroup(4, 4, 6))
    samples = [[*range(100), 200 + i // 2, 300 + i] for i in range(8)]
    assert decoding(samples, FREE) == (PrefixGroup(0, 8, 100),)


def test_a_sequence_without_the_prefix_parts_a_group() -> None:
    prefix = [1, 2, 3]
    tables = [[*prefix, 10], [*prefix, 11], [7, 8, 9, 12], [*prefix, 13], [*prefix, 14], [*prefix, 15]]
    assert decoding(tables, FREE) == (PrefixGroup(0, 2, 3), PrefixGroup(3, 3, 3))


def test_what_a_longer_prefix_leaves_over_shares_the_shorter_one() -> None:
    """Before it, behind it and between two of them; a sequence alone in a gap shares nothing."""
    system = [1, 2]
    plain = iter([*system, 100 + number] for number in range(10))
    deep = [[*system, 10, 11, 12, 13, 20 + number] for number in range(4)]
    other = [[*system, 30, 31, 32, 33, 40 + number] for number in range(4)]
    around = [next(plain), next(plain), *deep, next(plain), next(plain), next(plain)]
    assert decoding(around, FREE) == (PrefixGroup(0, 2, 2), PrefixGroup(2, 4, 6), PrefixGroup(6, 3, 2))
    between = [*deep, next(plain), next(plain), *other, next(plain)]
    assert decoding(between, FREE) == (PrefixGroup(0, 4, 6), PrefixGroup(4, 2, 2), PrefixGroup(6, 4, 6))


def test_only_blocks_before_the_step_are_shared() -> None:
    tables = [[1, 2, 3], [1, 2, 3]]
    assert find_prefix_groups(tables, [1, 16], [47, 32], 16, FREE) == (PrefixGroup(0, 2, 2),)
    assert find_prefix_groups(tables, [48, 48], [0, 0], 16, FREE) == ()


def test_no_sequence_and_a_single_one_share_nothing() -> None:
    assert find_prefix_groups([], [], [], 16, FREE) == ()
    assert decoding([[1, 2, 3]], FREE) == ()


def test_sharing_pays_with_more_sequences_and_longer_prefixes() -> None:
    """For 128 sequences a prefix of 128 tokens does not pay, one of 1024 does; for fewer it must be longer."""
    assert not decoding(forked(128, 128 // 16), H100)
    assert decoding(forked(128, 1024 // 16), H100)
    assert not decoding(forked(2, 1024 // 16), H100)
    assert not decoding(forked(8, 256 // 16), H100)
    assert decoding(forked(32, 4096 // 16), H100)


def test_a_prefill_beside_the_group_raises_the_bar() -> None:
    """Partial results of every query token of the batch are merged, so a large prefill makes sharing dearer."""
    tables = [*forked(32, 2048 // 16), [99_999, *range(20_000, 20_512)]]
    context_lens = [2056] * 32 + [16]
    assert find_prefix_groups(tables, [1] * 33, context_lens, 16, H100)
    assert not find_prefix_groups(tables, [1] * 32 + [8192], context_lens, 16, H100)


@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=5), min_size=1, max_size=8),
    st.integers(1, 3),
)
def test_no_single_level_is_better(paths: list[list[int]], tile: int) -> None:
    """On random trees of blocks (a block is its path): against groups by the first k blocks, for each k."""
    costs = PrefixCosts(queries_per_kv=1, plain_tile=1, shared_tile=tile, reread=1.0, merge=0.0, launch=0.0)
    ids: dict[tuple[int, ...], int] = {}
    tables = [[ids.setdefault(tuple(path[: i + 1]), len(ids)) for i in range(len(path))] for path in paths]

    def saved(num_seqs: int, num_blocks: int) -> int:
        return num_blocks * 16 * (num_seqs + -num_seqs // tile)

    groups = decoding(tables, costs)
    for level in range(1, 5):
        runs = groupby(tables, key=lambda table: tuple(table[:level]) if len(table) > level else None)
        saved_at_level = sum(saved(len(list(run)), level) for prefix, run in runs if prefix is not None)
        assert sum(saved(group.num_seqs, group.num_blocks) for group in groups) >= saved_at_level

    end = 0
    for group in groups:
        assert group.first_seq >= end
        end = group.first_seq + group.num_seqs
        prefixes = {tuple(table[: group.num_blocks]) for table in tables[group.first_seq : end]}
        assert len(prefixes) == 1
        assert all(len(table) > group.num_blocks for table in tables[group.first_seq : end])


def test_tensors_for_the_kernels_put_every_sequence_in_a_run() -> None:
    tables = [[7, 8], [1, 2, 3], [1, 2, 4], [9]]
    shared = SharedPrefixes.from_groups(
        [PrefixGroup(1, 2, 2)], tables, [0, 1, 2, 5, 6], block_size=16, device=torch.device("cpu")
    )
    assert shared is not None
    assert shared.block_tables.tolist() == [[0, 0], [1, 2], [0, 0]]
    assert shared.prefix_lens.tolist() == [0, 32, 0]
    assert shared.query_start_loc.tolist() == [0, 1, 5, 6]
    assert shared.seq_prefix_lens.tolist() == [0, 32, 32, 0]
    assert (shared.max_query_len, shared.max_prefix_len, shared.max_tail_len) == (4, 32, 32)
    assert SharedPrefixes.from_groups([], tables, [0, 1, 2, 5, 6], 16, torch.device("cpu")) is None

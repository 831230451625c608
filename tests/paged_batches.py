"""Ragged batches over a poisoned cache, for the tests that compare a kernel backend with `reference`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from pagedbatch_kernels.interface import AttentionBatch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PagedCase:
    """The arguments of `paged_attention`, and the plan behind them."""

    query: Tensor
    layer_cache: Tensor
    batch: AttentionBatch
    block_tables: list[list[int]]
    query_start_loc: list[int]


def paged_case(
    lens: Sequence[tuple[int, int]],
    *,
    block_size: int = 8,
    num_kv_heads: int = 2,
    queries_per_kv: int = 2,
    head_size: int = 32,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    shared_blocks: int = 0,
    seed: int = 0,
) -> PagedCase:
    """Sequences of (seq_len, query_len) over a shuffled pool.

    Every slot that no sequence filled is NaN; block table entries past a sequence's last block name a block of NaN.
    With `shared_blocks`, all tables begin with the same blocks, as those of forks do.
    """
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    num_blocks = [-(-seq_len // block_size) for seq_len, _ in lens]
    pool = list(range(sum(num_blocks) + 3))
    rng.shuffle(pool)
    poison = pool.pop()
    shared = [pool.pop() for _ in range(shared_blocks)]
    tables = [[*shared[:count], *(pool.pop() for _ in range(count - len(shared[:count])))] for count in num_blocks]

    shape = (2, sum(num_blocks) + 3, block_size, num_kv_heads, head_size)
    cache = torch.full(shape, float("nan"))
    for (seq_len, _), table in zip(lens, tables, strict=True):
        for index, block in enumerate(table):
            filled = min(block_size, seq_len - index * block_size)
            cache[:, block, :filled] = torch.randn((2, filled, num_kv_heads, head_size), generator=generator)

    starts = [0]
    for _, query_len in lens:
        starts.append(starts[-1] + query_len)
    packed = torch.full((len(lens), max(num_blocks) + 2), poison, dtype=torch.int32)
    for row, table in enumerate(tables):
        packed[row, : len(table)] = torch.tensor(table)
    query = torch.randn((starts[-1], num_kv_heads * queries_per_kv, head_size), generator=generator)
    batch = AttentionBatch(
        block_tables=packed.to(device),
        seq_lens=torch.tensor([seq_len for seq_len, _ in lens], dtype=torch.int32, device=device),
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
        slot_mapping=torch.zeros(starts[-1], dtype=torch.int64, device=device),
        max_query_len=max(query_len for _, query_len in lens),
        max_seq_len=max(seq_len for seq_len, _ in lens),
    )
    return PagedCase(query.to(device, dtype), cache.to(device, dtype), batch, tables, starts)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference as a share of the largest expected value; NaN where anything is NaN."""
    return float((actual.float() - expected.float()).abs().max() / expected.float().abs().max())

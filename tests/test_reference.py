"""The oracle against an oracle: plain torch attention over the pool, and dense attention written as its definition."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from pagedbatch_kernels import reference
from pagedbatch_kernels.interface import AttentionBatch, CacheShape
from torch import Tensor

CPU = torch.device("cpu")
BLOCK_SIZE = 8
HEAD_SIZE = 16
#: (query_len, seq_len): decodes, whole prompts, chunks of prompts; lengths at block borders and one to either side.
MIXED = [(1, 1), (1, 7), (1, 8), (1, 9), (5, 5), (8, 8), (9, 9), (3, 17), (16, 24), (1, 40), (7, 33), (2, 2)]


@dataclass
class Step:
    """A layer's cache with every unused slot poisoned, and the dense K and V that it holds."""

    query: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    layer_cache: Tensor
    batch: AttentionBatch

    def rows(self, i: int) -> Tensor:
        return self.query[self.batch.query_start_loc[i] : self.batch.query_start_loc[i + 1]]


def make_step(lengths: list[tuple[int, int]], num_heads: int = 4, num_kv_heads: int = 2, seed: int = 0) -> Step:
    """Sequences whose blocks lie shuffled in the pool."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    keys = [normal(seq_len, num_kv_heads, HEAD_SIZE) for _, seq_len in lengths]
    values = [normal(seq_len, num_kv_heads, HEAD_SIZE) for _, seq_len in lengths]
    num_blocks = [math.ceil(seq_len / BLOCK_SIZE) for _, seq_len in lengths]
    shuffled = torch.split(torch.randperm(sum(num_blocks) + 3, generator=generator)[: sum(num_blocks)], num_blocks)
    block_tables = torch.full((len(lengths), max(num_blocks)), 0, dtype=torch.int32)

    shape = CacheShape(1, BLOCK_SIZE, num_kv_heads, HEAD_SIZE)
    layer_cache = reference.allocate_cache(shape, sum(num_blocks) + 3, torch.float32, CPU)[0].fill_(torch.nan)
    slots_of_queries = []
    for i, (query_len, seq_len) in enumerate(lengths):
        block_tables[i, : num_blocks[i]] = shuffled[i]
        position = torch.arange(seq_len)
        slots = shuffled[i][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        reference.write_kv(keys[i], values[i], layer_cache, slots)
        slots_of_queries.append(slots[seq_len - query_len :])

    query_lens = torch.tensor([query_len for query_len, _ in lengths])
    return Step(
        query=normal(int(query_lens.sum()), num_heads, HEAD_SIZE),
        keys=keys,
        values=values,
        layer_cache=layer_cache,
        batch=AttentionBatch(
            block_tables=block_tables,
            seq_lens=torch.tensor([seq_len for _, seq_len in lengths], dtype=torch.int32),
            query_start_loc=torch.cat([torch.tensor([0]), query_lens.cumsum(0)]).int(),
            slot_mapping=torch.cat(slots_of_queries),
            max_query_len=int(query_lens.max()),
            max_seq_len=max(seq_len for _, seq_len in lengths),
        ),
    )


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """One query token and one head at a time, in float64."""
    query, key, value = query.double(), key.double(), value.double()
    query_len, num_heads, _ = query.shape
    output = torch.empty_like(query)
    for head in range(num_heads):
        kv_head = head * key.shape[1] // num_heads
        for i in range(query_len):
            position = len(key) - query_len + i
            first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            scores = key[first : position + 1, kv_head] @ query[i, head] * scale
            if softcap is not None:
                scores = (scores / softcap).tanh() * softcap
            weights = scores.exp()
            total = weights.sum() + (0.0 if sinks is None else sinks[head].double().exp())
            output[i, head] = weights @ value[first : position + 1, kv_head] / total
    return output.to(torch.float32)


def assert_equals_dense(step: Step, **options: Any) -> None:
    output = reference.paged_attention(step.query, step.layer_cache, step.batch, scale=0.3, **options)
    for i, (key, value) in enumerate(zip(step.keys, step.values, strict=True)):
        rows = slice(int(step.batch.query_start_loc[i]), int(step.batch.query_start_loc[i + 1]))
        expected = dense_attention(step.rows(i), key, value, 0.3, **options)
        torch.testing.assert_close(output[rows], expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 2), (6, 2), (8, 1), (7, 1)])
def test_ragged_batch_of_prefills_and_decodes(num_heads: int, num_kv_heads: int) -> None:
    assert_equals_dense(make_step(MIXED, num_heads, num_kv_heads))


@pytest.mark.parametrize("seq_len", [1, 7, 8, 9, 15, 16, 17, 23, 24, 25])
def test_lengths_at_block_borders(seq_len: int) -> None:
    assert_equals_dense(make_step([(1, seq_len), (seq_len, seq_len), (min(2, seq_len), seq_len)], seed=seq_len))


@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 1},
        {"sliding_window": 5},
        {"sliding_window": 8},
        {"sliding_window": 1000},
        {"softcap": 0.7},
        {"sinks": torch.tensor([0.5, -2.0, 3.0, 0.0])},
        {"sliding_window": 6, "softcap": 1.5, "sinks": torch.tensor([0.1, 1.0, -1.0, 2.0])},
    ],
    ids=lambda options: "-".join(options),
)
def test_options(options: dict[str, Any]) -> None:
    assert_equals_dense(make_step(MIXED), **options)


def test_row_is_bitwise_the_same_alone_and_in_a_batch() -> None:
    step = make_step(MIXED)
    together = reference.paged_attention(step.query, step.layer_cache, step.batch, scale=0.3)
    for i, (query_len, seq_len) in enumerate(MIXED):
        alone = AttentionBatch(
            block_tables=step.batch.block_tables[i : i + 1],
            seq_lens=step.batch.seq_lens[i : i + 1],
            query_start_loc=torch.tensor([0, query_len], dtype=torch.int32),
            slot_mapping=torch.empty(0, dtype=torch.int64),
            max_query_len=query_len,
            max_seq_len=seq_len,
        )
        rows = slice(int(step.batch.query_start_loc[i]), int(step.batch.query_start_loc[i + 1]))
        assert torch.equal(reference.paged_attention(step.rows(i), step.layer_cache, alone, scale=0.3), together[rows])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    step = make_step(MIXED)
    half_query, half_cache = step.query.to(dtype), step.layer_cache.to(dtype)
    output = reference.paged_attention(half_query, half_cache, step.batch, scale=0.3)
    assert output.dtype == dtype
    wide = reference.paged_attention(half_query.float(), half_cache.float(), step.batch, scale=0.3)
    assert torch.equal(output, wide.to(dtype))


def test_write_kv_touches_its_slots_only() -> None:
    shape = CacheShape(1, BLOCK_SIZE, 2, HEAD_SIZE)
    layer_cache = reference.allocate_cache(shape, 4, torch.float32, CPU)[0].fill_(-1.0)
    slots = torch.tensor([9, 0, 31])
    key, value = torch.rand(2, 3, 2, HEAD_SIZE)
    reference.write_kv(key, value, layer_cache, slots)
    for stored, written in zip(layer_cache.flatten(1, 2), (key, value), strict=True):
        assert torch.equal(stored[slots], written)
        untouched = torch.ones(32, dtype=torch.bool)
        untouched[slots] = False
        assert (stored[untouched] == -1.0).all()


def test_copy_blocks_copies_all_layers() -> None:
    cache = torch.rand(reference.allocate_cache(CacheShape(3, 4, 2, 8), 6, torch.float32, CPU).shape)
    before = cache.clone()
    reference.copy_blocks(cache, torch.tensor([0, 0, 4]), torch.tensor([5, 2, 1]))
    assert torch.equal(cache[:, :, [5, 2, 1]], before[:, :, [0, 0, 4]])
    assert torch.equal(cache[:, :, [0, 3, 4]], before[:, :, [0, 3, 4]])


def test_swap_blocks_goes_there_and_back() -> None:
    device_cache, host_cache = torch.rand(3, 2, 5, 4, 2, 8), torch.full((3, 2, 3, 4, 2, 8), -1.0)
    before = device_cache.clone()
    reference.swap_blocks(device_cache, host_cache, torch.tensor([4, 1]), torch.tensor([0, 2]))
    assert torch.equal(host_cache[:, :, [0, 2]], before[:, :, [4, 1]])
    assert (host_cache[:, :, 1] == -1.0).all()
    reference.swap_blocks(host_cache, device_cache, torch.tensor([0, 2]), torch.tensor([3, 0]))
    assert torch.equal(device_cache[:, :, [3, 0]], before[:, :, [4, 1]])
    assert torch.equal(device_cache[:, :, [1, 2, 4]], before[:, :, [1, 2, 4]])

"""A token that is NaN or infinite, in its K, its V or its query, changes no bit for those that do not see it: other
sequences, and earlier tokens of its own, whose blocks the prefix cache may give to others. Each backend."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import torch
from bad_rows import BAD
from pagedbatch_kernels import reference
from pagedbatch_kernels.cpu.backend import CpuBackend
from pagedbatch_kernels.cpu.build import can_load
from pagedbatch_kernels.interface import AttentionBatch, Backend, CacheShape, SharedPrefixes
from pagedbatch_kernels.prefix_groups import PrefixGroup
from torch import Tensor

CPU = torch.device("cpu")
NUM_HEADS, NUM_KV_HEADS = 4, 2
#: (block size, head size): packed by the CPU's backend, not packed, and blocks that fit no chunk of anything.
LAYOUTS = [(16, 32), (8, 24), (5, 16)]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"sliding_window": 5},
    {"softcap": 3.0},
    {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    {"sliding_window": 21, "softcap": 2.0, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
]


def backend_of(name: str, dtype: torch.dtype) -> Backend:
    if name == "torch":
        return cast(Backend, reference)
    if name == "cpu":
        if not can_load():
            pytest.skip("there is no C++ compiler here")
        return CpuBackend()
    pytest.importorskip("triton")
    from pagedbatch_kernels import triton_backend

    if torch.cuda.is_available():
        pytest.skip("gpu_check.py runs the kernels on the device")
    return cast(Backend, triton_backend)


@dataclass(frozen=True)
class Step:
    """Sequences of (seq_len, query_len) whose blocks lie anywhere in a cache of stale numbers."""

    backend: Backend
    dtype: torch.dtype
    block_size: int
    head_size: int
    lens: Sequence[tuple[int, int]]
    stale: float = torch.nan

    def run(self, bad: tuple[int, int, str, float] | None = None, **options: Any) -> list[Tensor]:
        """The outputs of each sequence's query tokens.

        Args:
            bad: a sequence, a position of it, which of "qkv" are bad there, and with what.
        """
        generator = torch.Generator().manual_seed(0)
        num_blocks = [-(-seq_len // self.block_size) for seq_len, _ in self.lens]
        pool = torch.randperm(sum(num_blocks) + 3, generator=generator).tolist()
        shape = CacheShape(1, self.block_size, NUM_KV_HEADS, self.head_size)
        cache = self.backend.allocate_cache(shape, len(pool), self.dtype, CPU)[0].fill_(self.stale)
        tables, queries, starts = [], [], [0]
        for i, (seq_len, query_len) in enumerate(self.lens):
            table = torch.tensor([pool.pop() for _ in range(num_blocks[i])])
            key, value = torch.randn(2, seq_len, NUM_KV_HEADS, self.head_size, generator=generator).to(self.dtype)
            query = torch.randn(query_len, NUM_HEADS, self.head_size, generator=generator).to(self.dtype)
            if bad is not None and bad[0] == i:
                _, position, parts, number = bad
                for part, rows in (("q", query), ("k", key), ("v", value)):
                    at = position - (seq_len - query_len) if part == "q" else position
                    if part in parts and at >= 0:
                        rows[at, :, -1] = number
            positions = torch.arange(seq_len)
            slots = table[positions // self.block_size] * self.block_size + positions % self.block_size
            self.backend.write_kv(key, value, cache, slots)
            tables.append(table)
            queries.append(query)
            starts.append(starts[-1] + query_len)
        batch = self.batch(tables, starts, pool[0])
        output = self.backend.paged_attention(torch.cat(queries), cache, batch, scale=0.3, **options)
        return list(output.split([query_len for _, query_len in self.lens]))

    def batch(self, tables: list[Tensor], starts: list[int], unused_block: int) -> AttentionBatch:
        """What stands in a table after a sequence's last block is arbitrary: here a block of stale numbers."""
        packed = torch.full((len(tables), max(map(len, tables)) + 2), unused_block, dtype=torch.int32)
        for row, table in enumerate(tables):
            packed[row, : len(table)] = table
        seq_lens = [seq_len for seq_len, _ in self.lens]
        return AttentionBatch(
            block_tables=packed,
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            slot_mapping=torch.zeros(starts[-1], dtype=torch.int64),
            max_query_len=max(query_len for _, query_len in self.lens),
            max_seq_len=max(seq_lens),
        )


DTYPES = [torch.float32, torch.bfloat16, torch.float16]
#: Triton's interpreter takes a second for what takes the others 10 ms: few of all combinations, and short sequences.
CASES = pytest.mark.parametrize(
    ("name", "dtype", "layout", "options"),
    [
        *itertools.product(["torch", "cpu"], DTYPES, LAYOUTS, OPTIONS),
        ("triton", torch.float32, (8, 24), OPTIONS[0]),
        ("triton", torch.bfloat16, (5, 16), OPTIONS[4]),
    ],
    ids=lambda value: "-".join(map(str, value)) or "plain" if isinstance(value, dict) else str(value),
)
#: Prompts, chunks of prompts and decodes, that end within blocks and at their ends; and bad tokens among them.
LENS = {"triton": [(9, 9), (11, 4)]}
ANY_LENS = [(21, 21), (33, 1), (40, 13), (16, 16), (9, 1)]
BAD_TOKENS = {"triton": [(0, 3), (1, 8)]}
ANY_BAD_TOKENS = [(0, 0), (0, 18), (2, 30), (2, 39), (1, 14), (3, 7)]


@CASES
def test_a_bad_token(name: str, dtype: torch.dtype, layout: tuple[int, int], options: dict[str, Any]) -> None:
    lens = LENS.get(name, ANY_LENS)
    step = Step(backend_of(name, dtype), dtype, *layout, lens)
    good = step.run(**options)
    assert all(output.isfinite().all() for output in good)
    window = options.get("sliding_window", 10**9)
    for number, (sequence, position) in enumerate(BAD_TOKENS.get(name, ANY_BAD_TOKENS)):
        parts = ("v", "k", "kv", "qkv")[number % 4]
        value = BAD[number % 3] if "v" in parts else torch.nan  # a key of infinity may just lose its weight
        found = step.run((sequence, position, parts, value), **options)
        for i, (seq_len, query_len) in enumerate(lens):
            positions = torch.arange(seq_len - query_len, seq_len)
            sees = (positions >= position) & (positions < position + window) & (i == sequence)
            assert torch.equal(found[i][~sees], good[i][~sees])
            assert found[i][sees].isnan().flatten(1).any(dim=1).all()


@CASES
def test_stale_slots(name: str, dtype: torch.dtype, layout: tuple[int, int], options: dict[str, Any]) -> None:
    """What a block's last owner left, or nobody ever wrote, is read as nothing, after a sequence's end too."""
    backend, ends = backend_of(name, dtype), [3, 7] if name == "triton" else range(1, 2 * layout[0] + 2, 3)
    lens = [(seq_len, min(query_len, seq_len)) for seq_len in ends for query_len in (1, 99)]
    clean = Step(backend, dtype, *layout, lens, stale=0.0)
    expected = torch.cat(clean.run(**options))
    assert expected.isfinite().all()
    for stale in BAD[:2]:
        assert torch.equal(torch.cat(replace(clean, stale=stale).run(**options)), expected)


@pytest.mark.parametrize(
    ("name", "dtype", "options", "value"),
    [
        *itertools.product(["cpu"], DTYPES[:2], [OPTIONS[0], OPTIONS[2], OPTIONS[3]], BAD[:2]),
        ("triton", torch.float32, OPTIONS[3], torch.nan),
    ],
    ids=str,
)
def test_shared_prefixes(name: str, dtype: torch.dtype, options: dict[str, Any], value: float) -> None:
    """Two groups of rows that read their prefixes together, one of them with a bad token: the other, and the rest."""
    backend, block_size, head_size, prefix_blocks = backend_of(name, dtype), 16, 16, 1 if name == "triton" else 4
    tail_lens, query_lens = (3, 17, 9, 30, 12), (1, 4, 1, 1, 12)
    groups = [PrefixGroup(0, 2, prefix_blocks), PrefixGroup(2, 2, prefix_blocks)]
    prefix_len = prefix_blocks * block_size
    generator = torch.Generator().manual_seed(0)
    pool = torch.randperm(30, generator=generator).tolist()
    shared = [[pool.pop() for _ in range(prefix_blocks)] for _ in groups]
    tables = [
        [*(shared[row // 2] if row < 4 else []), *(pool.pop() for _ in range(-(-tail_len // block_size)))]
        for row, tail_len in enumerate(tail_lens)
    ]
    seq_lens = [tail_len + (prefix_len if row < 4 else 0) for row, tail_len in enumerate(tail_lens)]
    starts = torch.tensor([0, *query_lens]).cumsum(0).tolist()
    lens = list(zip(seq_lens, query_lens, strict=True))
    keys, values = torch.randn(2, 30 * block_size, NUM_KV_HEADS, head_size, generator=generator).to(dtype)
    query = torch.randn(starts[-1], NUM_HEADS, head_size, generator=generator).to(dtype)
    batch = Step(backend, dtype, block_size, head_size, lens).batch(
        [torch.tensor(table) for table in tables], starts, pool[0]
    )
    batch = replace(batch, shared_prefixes=SharedPrefixes.from_groups(groups, tables, starts, block_size, CPU))

    def run(bad_slots: list[int]) -> list[Tensor]:
        cache = backend.allocate_cache(CacheShape(1, block_size, NUM_KV_HEADS, head_size), 30, dtype, CPU)[0]
        cache.fill_(torch.nan)
        for table, seq_len in zip(tables, seq_lens, strict=True):
            slots = torch.tensor([table[i // block_size] * block_size + i % block_size for i in range(seq_len)])
            mixed = values[slots].clone()
            mixed[torch.isin(slots, torch.tensor(bad_slots)), :, 3] = value
            backend.write_kv(keys[slots], mixed, cache, slots)
        output = backend.paged_attention(query, cache, batch, scale=0.3, **options)
        return list(output.split(query_lens))

    good = run([])
    for bad_slot, touched in ((shared[0][-1] * block_size + 7, (0, 1)), (tables[3][-1] * block_size, (3,))):
        found = run([bad_slot])
        for row in range(5):
            assert found[row].isnan().any() if row in touched else torch.equal(found[row], good[row])

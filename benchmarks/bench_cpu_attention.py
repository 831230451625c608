"""Times one layer's attention on a CPU, the native kernel against the torch reference.

    python benchmarks/bench_cpu_attention.py

The shapes are SmolLM2-135M's: 9 heads, 3 KV heads of 64. Run it on a quiet machine; OMP_NUM_THREADS sets the threads.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import cast

import torch
from pagedbatch_kernels import reference
from pagedbatch_kernels.cpu.backend import CpuBackend
from pagedbatch_kernels.interface import AttentionBatch, AttentionShape, Backend, CacheShape, SharedPrefixes
from pagedbatch_kernels.prefix_groups import find_prefix_groups
from torch import Tensor

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 9, 3, 64, 16
#: As in a model, other layers' caches are read between two calls on one, so that the CPU's caches hold nothing of it.
NUM_LAYERS = 4
CPU = torch.device("cpu")
REFERENCE = cast(Backend, reference)
REPEATS = 5


@dataclass(frozen=True, slots=True)
class Workload:
    """Sequences as (length, query tokens), the first `shared_len` tokens of each `group` of them in common."""

    name: str
    lens: Sequence[tuple[int, int]]
    group: int = 1
    shared_len: int = 0


def workloads() -> list[Workload]:
    rng = random.Random(0)
    return [
        Workload("decode, 64 sequences of 200 to 280", [(rng.randrange(200, 281), 1) for _ in range(64)]),
        Workload("decode, 4 sequences of 4,000", [(4000, 1)] * 4),
        Workload("prefill, 8 prompts of 220", [(220, 220)] * 8),
        Workload("prefill, 8 prompts of 1,650", [(1650, 1650)] * 8),
        Workload("prefill, a chunk of 512 after 1,500", [(2012, 512)]),
        Workload(
            "decode, 16 groups x 8 sequences sharing 220",
            [(220 + rng.randrange(8, 64), 1) for _ in range(128)],
            group=8,
            shared_len=220,
        ),
        Workload(
            "decode, 8 groups x 8 sequences sharing 1,650",
            [(1650 + rng.randrange(8, 64), 1) for _ in range(64)],
            group=8,
            shared_len=1650,
        ),
    ]


@dataclass(frozen=True, slots=True)
class Work:
    """A query, the caches of NUM_LAYERS and a batch, plain and with the shared prefixes that the backend chooses.

    The caches hold noise, different in the reference's layout and in the kernel's.
    """

    query: Tensor
    caches: Tensor
    reference_caches: Tensor
    plain: AttentionBatch
    gated: AttentionBatch


def work(workload: Workload, dtype: torch.dtype, backend: CpuBackend) -> Work:
    rng = random.Random(1)
    num_blocks = [-(-seq_len // BLOCK_SIZE) for seq_len, _ in workload.lens]
    free = list(range(sum(num_blocks)))
    rng.shuffle(free)
    tables: list[list[int]] = []
    for i, count in enumerate(num_blocks):
        shared = tables[-1][: workload.shared_len // BLOCK_SIZE] if i % workload.group else []
        tables.append([*shared, *(free.pop() for _ in range(count - len(shared)))])
    shape = CacheShape(NUM_LAYERS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE)
    caches = backend.allocate_cache(shape, sum(num_blocks), dtype, CPU)
    caches.copy_(torch.randn(caches.shape[1:]))
    reference_caches = reference.allocate_cache(shape, sum(num_blocks), dtype, CPU)
    reference_caches.copy_(torch.randn(reference_caches.shape[1:]))

    query_lens = [query_len for _, query_len in workload.lens]
    context_lens = [seq_len - query_len for seq_len, query_len in workload.lens]
    starts = [sum(query_lens[:i]) for i in range(len(query_lens) + 1)]
    packed = torch.zeros(len(tables), max(num_blocks), dtype=torch.int32)
    for i, table in enumerate(tables):
        packed[i, : len(table)] = torch.tensor(table)
    plain = AttentionBatch(
        block_tables=packed,
        seq_lens=torch.tensor([seq_len for seq_len, _ in workload.lens], dtype=torch.int32),
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        slot_mapping=torch.empty(0, dtype=torch.int64),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_len for seq_len, _ in workload.lens),
    )
    costs = backend.prefix_costs(AttentionShape(NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, dtype.itemsize), CPU)
    groups = find_prefix_groups(tables, query_lens, context_lens, BLOCK_SIZE, costs)
    shared_prefixes = SharedPrefixes.from_groups(groups, tables, starts, BLOCK_SIZE, CPU)
    query = torch.randn(starts[-1], NUM_HEADS, HEAD_SIZE).to(dtype)
    return Work(query, caches, reference_caches, plain, replace(plain, shared_prefixes=shared_prefixes))


def milliseconds(call: Callable[[], object]) -> float:
    """The fastest of a few calls, after a warm-up."""
    call()
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return 1000 * min(seconds)


def main() -> None:
    backend = CpuBackend()
    print(f"one layer, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}; milliseconds")
    print(f"{'':44}{'torch':>10}{'plain':>10}{'ratio':>8}{'gated':>10}{'ratio':>8}")
    for workload in workloads():
        for dtype in (torch.float32, torch.bfloat16):
            one = work(workload, dtype, backend)
            caches, reference_caches = cycle(one.caches), cycle(one.reference_caches)

            def attend(of: Backend, caches: Iterator[Tensor], batch: AttentionBatch, query: Tensor = one.query) -> None:
                of.paged_attention(query, next(caches), batch, scale=HEAD_SIZE**-0.5)

            torch_ms = milliseconds(partial(attend, REFERENCE, reference_caches, one.plain))
            plain_ms, gated_ms = (
                milliseconds(partial(attend, backend, caches, batch)) for batch in (one.plain, one.gated)
            )
            print(
                f"{workload.name:42}{'bf16' if dtype == torch.bfloat16 else ' f32':>4}{torch_ms:8.2f}{plain_ms:10.2f}"
                f"{torch_ms / plain_ms:7.1f}x{gated_ms:10.2f}{torch_ms / gated_ms:7.1f}x"
            )


if __name__ == "__main__":
    with torch.inference_mode():
        main()

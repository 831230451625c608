"""Checks and times the kernels on a GPU: `make gpu-check`.

Sections, in the shape of Qwen3-0.6B's attention (16 query heads on 8 KV heads of 128, bfloat16, blocks of 16):
- every kernel against the torch reference;
- decoding: bandwidth of reading K/V as a share of a device copy's, by batch and context;
- the same and a prefill against torch's flash attention on contiguous K/V;
- shared prefixes against the plain pass, and which of them `PrefixCosts` chooses;
- the whole engine with random weights (`gpu_end_to_end.py`).

Prints a table, then one line of JSON. Exits with 1 if a result is wrong; a missed goal is only shown. `--dry` runs the
same at toy size in Triton's interpreter, without a GPU; its times mean nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

if "--dry" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton
from gpu_end_to_end import run_workloads
from pagedbatch_kernels import reference, triton_backend
from pagedbatch_kernels.interface import AttentionBatch, CacheShape, SharedPrefixes
from pagedbatch_kernels.launch import prefix_costs
from pagedbatch_kernels.prefix_groups import PrefixCosts, PrefixGroup, find_prefix_groups
from pagedbatch_kernels.triton_device import device_limits
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

DECODE_GOAL = 0.85  # of the copy's bandwidth, for contexts of 8k or more and 1 GiB or more to read
PREFIX_GOAL = 4.0  # speedup over plain, for 128 sequences x 1024 tokens
MAX_SHARED_SHARE = 1.03  # of plain's time, where sharing was chosen
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-2}


@dataclass(frozen=True, slots=True)
class Setup:
    """The device and the sizes to run."""

    device: torch.device
    num_heads: int = 16
    num_kv_heads: int = 8
    head_size: int = 128
    block_size: int = 16
    batches: tuple[int, ...] = (1, 4, 16, 64, 128, 256)
    contexts: tuple[int, ...] = (1024, 4096, 8192, 32768)
    against_sdpa: tuple[tuple[int, int], ...] = ((1, 32768), (16, 8192), (64, 4096), (256, 1024))
    prefill: tuple[int, int] = (8, 2048)  #: prompts, tokens
    prefixes: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096)
    prefix_seqs: tuple[int, ...] = (8, 32, 128)
    tail: int = 64
    dtype: torch.dtype = torch.bfloat16

    @property
    def dry(self) -> bool:
        return self.device.type == "cpu"

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.head_size)

    def kv_bytes(self, num_tokens: int) -> int:
        return 2 * num_tokens * self.num_kv_heads * self.head_size * self.dtype.itemsize

    def fits(self, num_tokens: int) -> bool:
        """Whether K/V of `num_tokens` tokens fit twice."""
        if self.dry:
            return True
        torch.cuda.empty_cache()  # frees what the last case held
        return 2 * self.kv_bytes(num_tokens) < torch.cuda.mem_get_info(self.device)[0]


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table. `wrong`: the kernel's result is; `goal`: "met", "missed" or empty."""

    section: str
    case: str
    figures: dict[str, float] = field(default_factory=dict)
    note: str = ""
    goal: str = ""
    wrong: bool = False


@dataclass(frozen=True, slots=True)
class LayerInput:
    """One layer's inputs: sequences over shuffled blocks of a pool."""

    query: Tensor
    layer_cache: Tensor
    batch: AttentionBatch
    block_tables: list[list[int]]
    query_start_loc: list[int]

    def run(self, setup: Setup) -> Tensor:
        return triton_backend.paged_attention(self.query, self.layer_cache, self.batch, scale=setup.scale)


def make_input(setup: Setup, lens: Sequence[tuple[int, int]], *, prefix_len: int = 0) -> LayerInput:
    """Sequences of (seq_len, query_len), whose first `prefix_len` tokens lie in the same blocks."""
    size = setup.block_size
    shared = list(range(prefix_len // size))
    counts = [-(-seq_len // size) - len(shared) for seq_len, _ in lens]
    pool = list(range(len(shared), len(shared) + sum(counts)))
    random.Random(0).shuffle(pool)
    ends = list(itertools.accumulate(counts, initial=0))
    tables = [[*shared, *pool[begin:end]] for begin, end in itertools.pairwise(ends)]
    starts = list(itertools.accumulate((query_len for _, query_len in lens), initial=0))

    generator = torch.Generator(setup.device).manual_seed(0)
    shape = (2, len(shared) + sum(counts), size, setup.num_kv_heads, setup.head_size)
    cache = torch.empty(shape, dtype=setup.dtype, device=setup.device).normal_(generator=generator)
    query = torch.empty((starts[-1], setup.num_heads, setup.head_size), dtype=setup.dtype, device=setup.device)
    width = max(map(len, tables))
    padded = torch.tensor([[*table, *[0] * (width - len(table))] for table in tables], dtype=torch.int32)
    batch = AttentionBatch(
        block_tables=padded.to(setup.device),
        seq_lens=torch.tensor([seq_len for seq_len, _ in lens], dtype=torch.int32, device=setup.device),
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=setup.device),
        slot_mapping=torch.zeros(starts[-1], dtype=torch.int64, device=setup.device),
        max_query_len=max(query_len for _, query_len in lens),
        max_seq_len=max(seq_len for seq_len, _ in lens),
    )
    return LayerInput(query.normal_(generator=generator), cache, batch, tables, starts)


def share(setup: Setup, layer: LayerInput, groups: Sequence[PrefixGroup]) -> LayerInput:
    prefixes = SharedPrefixes.from_groups(
        groups, layer.block_tables, layer.query_start_loc, setup.block_size, setup.device
    )
    return replace(layer, batch=replace(layer.batch, shared_prefixes=prefixes))


def microseconds(setup: Setup, call: Callable[[], object]) -> float:
    """Median time on the device with a cold L2 cache, as for each layer of a model."""
    if setup.dry:
        began = time.perf_counter()
        call()
        return (time.perf_counter() - began) * 1e6
    return float(triton.testing.do_bench(call, warmup=10, rep=50, return_mode="median")) * 1000


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.float() - expected.float()).abs().max() / expected.float().abs().max())


def correctness(setup: Setup) -> Iterator[Result]:
    """Attention with each feature, type and path, then the cache kernels."""
    ragged = [(1, 1), (15, 1), (16, 1), (17, 17), (400, 60), (33, 1), (250, 1)]
    if setup.dry:
        ragged = [(min(seq_len, 40), min(query_len, 20)) for seq_len, query_len in ragged]
    sinks = torch.linspace(-2, 2, setup.num_heads, device=setup.device)
    features: dict[str, dict[str, Any]] = {
        "plain": {},
        "all": {"sliding_window": 16, "softcap": 5.0, "sinks": sinks},
        "window 17": {"sliding_window": 17},
        "soft cap 2": {"softcap": 2.0},
        "sinks": {"sinks": sinks},
    }
    # Each feature is a compilation, so only bfloat16 gets all of them.
    matrix = {torch.bfloat16: (64, 80, 128, 192), torch.float16: (128,), torch.float32: (64, 256)}
    for dtype, head_sizes in matrix.items():
        for head_size in (32, 80) if setup.dry else head_sizes:
            here = replace(setup, dtype=dtype, head_size=head_size)
            layer = make_input(here, ragged)
            for name in features if dtype == torch.bfloat16 else ("plain", "all"):
                yield judge(here, layer, f"{name} d{head_size}", **features[name])
            lone = make_input(here, [(300 if setup.dry else 20_000, 1)])
            yield judge(here, lone, f"splits d{head_size}")
            prefix_len = 2 * here.block_size
            forked = make_input(here, [(prefix_len + 1 + i, 1) for i in range(9)], prefix_len=prefix_len)
            yield judge(here, share(here, forked, [PrefixGroup(0, 9, 2)]), f"shared prefix d{head_size}")
    yield from cache_correctness(setup)


def judge(setup: Setup, layer: LayerInput, case: str, **options: Any) -> Result:
    actual = triton_backend.paged_attention(layer.query, layer.layer_cache, layer.batch, scale=setup.scale, **options)
    expected = reference.paged_attention(layer.query, layer.layer_cache, layer.batch, scale=setup.scale, **options)
    off = error(actual, expected)
    name = str(setup.dtype).removeprefix("torch.")
    return Result("correctness", f"{case} {name}", {"error": off}, wrong=not off < TOLERANCE[setup.dtype])


def cache_correctness(setup: Setup) -> Iterator[Result]:
    num_layers, num_blocks = (2, 8) if setup.dry else (28, 512)
    shape = CacheShape(num_layers, setup.block_size, setup.num_kv_heads, setup.head_size)
    cache = triton_backend.allocate_cache(shape, num_blocks, setup.dtype, setup.device)
    host = triton_backend.allocate_cache(shape, num_blocks, setup.dtype, torch.device("cpu"))
    cache.normal_()
    expected = cache.clone()
    half = num_blocks // 2

    slots = torch.randperm(num_blocks * setup.block_size, device=setup.device)[: half * setup.block_size]
    key = torch.randn((2, len(slots), setup.num_kv_heads, setup.head_size), device=setup.device).to(setup.dtype)
    triton_backend.write_kv(key[0], key[1], cache[1], slots)
    reference.write_kv(key[0], key[1], expected[1], slots)
    yield Result("correctness", "write_kv", wrong=not torch.equal(cache, expected))

    ids = torch.randperm(num_blocks)
    src, dst = ids[:half], ids[half : 2 * half]
    src_here, dst_here = src.to(setup.device), dst.to(setup.device)
    copied = microseconds(setup, partial(triton_backend.copy_blocks, cache, src_here, dst_here))
    reference.copy_blocks(expected, src_here, dst_here)
    moved = half * shape.block_bytes(setup.dtype)
    figures = {"us": copied, "GB/s": 2 * moved / copied / 1e3}
    yield Result("correctness", f"copy_blocks {half}", figures, wrong=not torch.equal(cache, expected))

    out = microseconds(setup, partial(triton_backend.swap_blocks, cache, host, src, dst))
    cache[:, :, src_here] = 0
    back = microseconds(setup, partial(triton_backend.swap_blocks, host, cache, dst, src))
    figures = {"out GB/s": moved / out / 1e3, "in GB/s": moved / back / 1e3}
    yield Result("correctness", f"swap_blocks {half}", figures, wrong=not torch.equal(cache, expected))


def decode_bandwidth(setup: Setup) -> Iterator[Result]:
    """K/V bytes over time, against a plain copy on the same device."""
    num_bytes = 1 << (12 if setup.dry else 31)
    source = torch.empty(num_bytes // 4, dtype=torch.int32, device=setup.device)
    target = torch.empty_like(source)
    copy_rate = 2 * num_bytes / microseconds(setup, partial(target.copy_, source))
    yield Result("decode", "device copy", {"GB/s": copy_rate / 1e3})
    for context, batch in itertools.product(setup.contexts, setup.batches):
        if setup.fits(batch * context):
            yield decode_result(setup, batch, context, copy_rate)


def decode_result(setup: Setup, batch: int, context: int, copy_rate: float) -> Result:
    layer = make_input(setup, [(context, 1)] * batch)
    taken = microseconds(setup, partial(layer.run, setup))
    num_read = setup.kv_bytes(batch * context)
    share_of_copy = num_read / taken / copy_rate
    goal = ""
    if not setup.dry and context >= 8192 and num_read >= 1 << 30:
        goal = "met" if share_of_copy >= DECODE_GOAL else "missed"
    figures = {"us": taken, "GB/s": num_read / taken / 1e3, "of copy": share_of_copy}
    return Result("decode", f"{batch} x {context}", figures, goal=goal)


def against_sdpa(setup: Setup) -> Iterator[Result]:
    """Torch's flash attention over contiguous K/V: decoding, and a prefill with a causal mask."""
    cases = [(batch, context, 1) for batch, context in setup.against_sdpa]
    cases.append((setup.prefill[0], setup.prefill[1], setup.prefill[1]))
    for batch, context, query_len in cases:
        if setup.fits(2 * batch * context):
            yield sdpa_result(setup, batch, context, query_len)


def sdpa_result(setup: Setup, batch: int, context: int, query_len: int) -> Result:
    layer = make_input(setup, [(context, query_len)] * batch)
    shape = (2, batch, setup.num_kv_heads, context, setup.head_size)
    key, value = torch.randn(shape, dtype=setup.dtype, device=setup.device)
    query = layer.query.view(batch, query_len, setup.num_heads, setup.head_size).transpose(1, 2)

    def contiguous() -> Tensor:
        with sdpa_kernel([SDPBackend.MATH if setup.dry else SDPBackend.FLASH_ATTENTION]):
            return scaled_dot_product_attention(query, key, value, is_causal=query_len > 1, enable_gqa=True)

    ours, theirs = microseconds(setup, partial(layer.run, setup)), microseconds(setup, contiguous)
    kind = "decode" if query_len == 1 else "prefill"
    return Result("sdpa", f"{kind} {batch} x {context}", {"us": ours, "sdpa us": theirs, "times": theirs / ours})


def shared_prefix(setup: Setup) -> Iterator[Result]:
    """Sequences that differ in a short tail, with and without the shared pass."""
    costs = prefix_costs(
        device_limits(setup.device),
        num_heads=setup.num_heads,
        num_kv_heads=setup.num_kv_heads,
        head_size=setup.head_size,
        itemsize=setup.dtype.itemsize,
    )
    for num_seqs, prefix_len in itertools.product(setup.prefix_seqs, setup.prefixes):
        yield prefix_result(setup, num_seqs, prefix_len, costs)


def prefix_result(setup: Setup, num_seqs: int, prefix_len: int, costs: PrefixCosts) -> Result:
    context_len = prefix_len + setup.tail
    plain = make_input(setup, [(context_len + 1, 1)] * num_seqs, prefix_len=prefix_len)
    together = share(setup, plain, [PrefixGroup(0, num_seqs, prefix_len // setup.block_size)])
    off = error(together.run(setup), plain.run(setup))
    plain_us = microseconds(setup, partial(plain.run, setup))
    shared_us = microseconds(setup, partial(together.run, setup))
    chosen = bool(
        find_prefix_groups(plain.block_tables, [1] * num_seqs, [context_len] * num_seqs, setup.block_size, costs)
    )
    if setup.dry:
        goal = ""
    elif (num_seqs, prefix_len) == (128, 1024):
        goal = "met" if chosen and plain_us >= PREFIX_GOAL * shared_us else "missed"
    else:
        goal = "missed" if chosen and shared_us > MAX_SHARED_SHARE * plain_us else "met" if chosen else ""
    return Result(
        "prefix",
        f"{num_seqs} sequences x {prefix_len}",
        {"plain us": plain_us, "shared us": shared_us, "times": plain_us / shared_us},
        note="gate: shared" if chosen else "gate: plain",
        goal=goal,
        wrong=not off < TOLERANCE[setup.dtype],
    )


def end_to_end(setup: Setup) -> Iterator[Result]:
    """The whole engine, with random weights."""
    for outcome in run_workloads(dry=setup.dry):
        yield Result("end to end", outcome.name, outcome.figures, goal=outcome.goal)


#: Run in this order.
SECTIONS: tuple[Callable[[Setup], Iterator[Result]], ...] = (
    correctness,
    decode_bandwidth,
    against_sdpa,
    shared_prefix,
    end_to_end,
)


def dry_setup() -> Setup:
    return Setup(
        torch.device("cpu"),
        num_heads=4,
        num_kv_heads=2,
        head_size=32,
        batches=(1, 3),
        contexts=(33,),
        against_sdpa=((2, 40),),
        prefill=(2, 24),
        prefixes=(32,),
        prefix_seqs=(2, 5),
        tail=5,
    )


def print_result(result: Result) -> None:
    figures = "  ".join(f"{name} {value:.4g}" for name, value in result.figures.items())
    verdict = "WRONG" if result.wrong else f"goal {result.goal}" if result.goal else ""
    print(f"{result.section:12} {result.case:28} {figures:56} {result.note:13} {verdict}".rstrip(), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Check and time the kernels on a GPU.")
    parser.add_argument("--dry", action="store_true", help="toy sizes in Triton's interpreter, on the CPU")
    args = parser.parse_args()
    if not args.dry and not torch.cuda.is_available():
        print("gpu-check: there is no GPU; --dry runs the same at toy size on the CPU", file=sys.stderr)
        return 2
    setup = dry_setup() if args.dry else Setup(torch.device("cuda", torch.cuda.current_device()))

    began = time.perf_counter()
    results: list[Result] = []
    for section in SECTIONS:
        for result in section(setup):
            results.append(result)
            print_result(result)
    outcome = {
        "device": "interpreter" if setup.dry else torch.cuda.get_device_name(setup.device),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "seconds": time.perf_counter() - began,
        "wrong": sum(result.wrong for result in results),
        "goals_missed": sum(result.goal == "missed" for result in results),
        "rows": [asdict(result) for result in results],
    }
    print(json.dumps(outcome))
    return 1 if outcome["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())

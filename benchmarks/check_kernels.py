"""Compiles the Triton kernels for several GPUs, without having one: `make kernels-check`.

For every target, each tile that `choose_config` picks for decode, prefill and shared-prefix shapes is compiled:
bfloat16 at head sizes 64, 80, 128, 192 and 256 (powers of two, and both ways to pad), float16 at 128, float32 at 64,
128 and 256; bare, not causal, and with all features at once (window, soft cap, sinks, splits, shared prefix, seven
query heads per KV head), and with the tiles for a position bias: not causal, and causal in splits. Then the merge and
the cache kernels. Exits with 1 if a variant spills registers, uses more shared memory than the target has or than
estimated, or lacks a matrix instruction that its tile is meant for.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"  # before triton is imported: this script compiles
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import triton
from pagedbatch_kernels.launch import (
    MAX_REGISTERS,
    DeviceLimits,
    LaunchShape,
    Tile,
    choose_config,
)
from pagedbatch_kernels.triton_attention_kernels import attention_kernel, merge_kernel
from pagedbatch_kernels.triton_cache import _copy_blocks_kernel, _write_kv_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

KIB = 1024
TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), DeviceLimits("cuda", 80, 163 * KIB, 108)),
    "sm_86": (GPUTarget("cuda", 86, 32), DeviceLimits("cuda", 86, 99 * KIB, 84)),
    "sm_90": (GPUTarget("cuda", 90, 32), DeviceLimits("cuda", 90, 227 * KIB, 132)),
    "sm_100": (GPUTarget("cuda", 100, 32), DeviceLimits("cuda", 100, 227 * KIB, 148)),
    "gfx942": (GPUTarget("hip", "gfx942", 64), DeviceLimits("hip", 942, 64 * KIB, 304)),
}
KERNELS = {
    "attention": attention_kernel,
    "merge": merge_kernel,
    "write_kv": _write_kv_kernel,
    "copy_blocks": _copy_blocks_kernel,
}
MATRIX_INSTRUCTION = re.compile(r"mma\.sync|wgmma\.mma_async|tcgen05\.mma|v_mfma_\w+")
BITS = {"bf16": 16, "fp16": 16, "fp32": 32}


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel as one target compiles it. `types` and `constants` are by argument name; the rest are int32."""

    target: str
    kernel: str
    label: str
    types: dict[str, str]
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    estimated_shared: int | None = None
    needs_matrix_instruction: bool = False


@dataclass(slots=True)
class Report:
    """The resources of a compiled variant, and what is wrong with it."""

    registers: int = 0
    spill_bytes: int = 0
    shared: int = 0
    instruction: str = "-"
    faults: list[str] = field(default_factory=list)


def attention_variants(target: str) -> Iterator[Variant]:
    """Every tile that `choose_config` picks for the target, bare and with all features."""
    for dtype, head_sizes in {"bf16": (64, 80, 128, 192, 256), "fp16": (128,), "fp32": (64, 128, 256)}.items():
        for head_size in head_sizes:
            for features in ("bare", "cross", "prefix", "all", "bias", "causal bias"):
                shapes = launch_shapes(head_size, BITS[dtype] // 8, has_bias="bias" in features)
                for tile in dict.fromkeys(choose_config(shape, TARGETS[target][1]).tile for shape in shapes):
                    if features != "prefix" or tile.block_m > 16:
                        yield attention_variant(target, dtype, shapes[0], tile, features)


def launch_shapes(head_size: int, itemsize: int, *, has_bias: bool) -> list[LaunchShape]:
    return [
        LaunchShape(num_runs, num_runs * query_len, query_len, 4096, 8, queries_per_kv, head_size, itemsize, has_bias)
        for num_runs in (1, 8, 256)
        for query_len in (1, 16, 100, 2048)
        for queries_per_kv in (1, 4, 48)
    ]


def attention_variant(target: str, dtype: str, shape: LaunchShape, tile: Tile, features: str) -> Variant:
    size = f"{tile.block_m}x{tile.block_n} w{tile.num_warps} s{tile.num_stages}"
    everything, partial = features == "all", features in ("prefix", "all", "causal bias")
    types: dict[str, str | None] = {
        "output_ptr": "*fp32" if partial else f"*{dtype}",
        "lse_ptr": "*fp32" if partial else None,
        "query_ptr": f"*{dtype}",
        "key_ptr": f"*{dtype}",
        "value_ptr": f"*{dtype}",
        "sinks_ptr": f"*{dtype}" if everything else None,
        "bias_ptr": "*fp32" if shape.has_bias else None,
        "block_tables_ptr": "*i32",
        "kv_begin_ptr": "*i32" if everything else None,
        "kv_end_ptr": "*i32",
        "query_start_loc_ptr": "*i32",
        "window": "i32" if everything else None,
        "softcap": "fp32" if everything else None,
        "bias_reach": "i32" if shape.has_bias else None,
        "scale": "fp32",
    }
    constants = {
        "NUM_KV_HEADS": 8,
        "QUERIES_PER_KV": {"all": 7, "cross": 1, "bias": 1}.get(features, 4),
        "HEAD_SIZE": shape.head_size,
        "HEAD_PADDED": shape.head_padded,
        "BLOCK_SIZE": 16,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "ONE_TILE_PER_RUN": tile.block_m == 16 and not everything,
        "CAUSAL": features in ("bare", "all", "causal bias"),
    }
    return Variant(
        target=target,
        kernel="attention",
        label=f"{dtype} d{shape.head_size} {size} {features}",
        types={name: kind for name, kind in types.items() if kind is not None},
        constants=constants | {name: None for name, kind in types.items() if kind is None},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        estimated_shared=tile.shared_memory_bytes(shape, TARGETS[target][1]),
        needs_matrix_instruction=BITS[dtype] == 16,
    )


def other_variants(target: str) -> Iterator[Variant]:
    """The merge at its smallest and largest, and the cache kernels of a model with 8 KV heads of 128."""
    for num_parts, head_size in ((2, 128), (128, 256)):
        yield Variant(
            target,
            "merge",
            f"bf16 d{head_size} {num_parts} parts",
            {"output_ptr": "*bf16", "partial_ptr": "*fp32", "lse_ptr": "*fp32"},
            {
                "NUM_HEADS": 32,
                "HEAD_SIZE": head_size,
                "HEAD_PADDED": head_size,
                "PARTS_PADDED": num_parts,
                "BLOCK_PARTS": min(16, num_parts),
            },
        )
    caches = ("key_ptr", "value_ptr", "key_cache_ptr", "value_cache_ptr")
    yield Variant(
        target,
        "write_kv",
        "bf16 8 x d128",
        {**dict.fromkeys(caches, "*bf16"), "slot_mapping_ptr": "*i64"},
        {"BLOCK_SIZE": 16, "NUM_KV_HEADS": 8, "HEAD_SIZE": 128, "HEADS_PADDED": 8, "HEAD_PADDED": 128},
    )
    yield Variant(
        target,
        "copy_blocks",
        "bf16",
        {"source_ptr": "*bf16", "target_ptr": "*bf16", "source_ids_ptr": "*i64", "target_ids_ptr": "*i64"},
        {"ELEMENTS": 4096},
    )


def compile_variant(variant: Variant) -> Report:
    """Compiles a variant, and checks its resources and instructions."""
    target, limits = TARGETS[variant.target]
    kernel = KERNELS[variant.kernel]
    signature, aligned = {}, {}
    for index, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in variant.constants else variant.types.get(name, "i32")
        # As at a launch: pointers and the strides of real tensors are multiples of 16.
        if signature[name].startswith("*") or (name.startswith("stride_") and name != "stride_table"):
            aligned[(index,)] = [["tt.divisibility", 16]]
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    if limits.backend == "cuda" and variant.kernel == "attention":
        options["maxnreg"] = MAX_REGISTERS
    compiled = triton.compile(ASTSource(kernel, signature, variant.constants, aligned), target=target, options=options)

    report = Report(shared=compiled.metadata.shared)
    assembly = compiled.asm["ptx" if limits.backend == "cuda" else "amdgcn"]
    if limits.backend == "cuda":
        report.registers, report.spill_bytes = cubin_resources(compiled.asm["cubin"])
    else:
        report.registers = amd_number(assembly, "vgpr_count")
        report.spill_bytes = amd_number(assembly, "private_segment_fixed_size")
    instructions = sorted(set(MATRIX_INSTRUCTION.findall(assembly)))
    report.instruction = " ".join(instructions) or "-"

    if report.spill_bytes:
        report.faults.append("spills")
    if report.shared > limits.shared_memory_bytes:
        report.faults.append("more shared memory than the target has")
    if variant.estimated_shared is not None and report.shared > variant.estimated_shared:
        report.faults.append(f"more shared memory than the estimated {variant.estimated_shared}")
    if variant.needs_matrix_instruction and not instructions:
        report.faults.append("no matrix instruction")
    return report


def cubin_resources(cubin: bytes) -> tuple[int, int]:
    """Registers per thread, and bytes of its stack: all spills, as the kernels have no local arrays."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return numbers["REG"], numbers["STACK"] + numbers["LOCAL"]


def amd_number(assembly: str, key: str) -> int:
    match = re.search(rf"\.{key}:\s+(\d+)", assembly)
    if match is None:
        raise ValueError(f"no {key} in the AMD metadata")
    return int(match[1])


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile the kernel matrix without a GPU.")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS), metavar="TARGET")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()

    variants = [v for target in args.targets for v in (*attention_variants(target), *other_variants(target))]
    failed = 0
    print(f"{'target':8}{'kernel':13}{'variant':38}{'registers':>10}{'spills':>8}{'shared':>8}  matrix instruction")
    with ProcessPoolExecutor(args.jobs) as pool:
        for variant, report in zip(variants, pool.map(compile_variant, variants), strict=True):
            failed += bool(report.faults)
            print(
                f"{variant.target:8}{variant.kernel:13}{variant.label:38}{report.registers:>10}{report.spill_bytes:>8}"
                f"{report.shared:>8}  {report.instruction}{''.join(f'  FAIL: {fault}' for fault in report.faults)}",
                flush=True,
            )
    print(f"{len(variants)} variants, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""The launch chooser: pure numbers, so every device can be asked about without one."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from pagedbatch_kernels.launch import (
    DeviceLimits,
    LaunchShape,
    choose_config,
    num_tiles,
    one_tile_per_run,
    prefix_costs,
)

KIB = 1024
HEAD_SIZES = (32, 64, 80, 96, 112, 128, 192, 256)


def decode(
    num_seqs: int, kv_len: int, *, head_size: int = 128, itemsize: int = 2, num_kv_heads: int = 8
) -> LaunchShape:
    return LaunchShape(num_seqs, num_seqs, 1, kv_len, num_kv_heads, 4, head_size, itemsize)


def prefill(query_len: int, *, head_size: int = 128, itemsize: int = 2) -> LaunchShape:
    return LaunchShape(4, 4 * query_len, query_len, query_len, 8, 4, head_size, itemsize)


@pytest.mark.parametrize("kib", [48, 64, 99, 163, 227])
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_estimated_shared_memory_fits_every_limit(kib: int, capability: int) -> None:
    limits = DeviceLimits("cuda", capability, kib * KIB, 100)
    for head_size, itemsize in itertools.product(HEAD_SIZES, (2, 4)):
        for shape in (
            decode(1, 32768, head_size=head_size, itemsize=itemsize),
            decode(256, 1024, head_size=head_size, itemsize=itemsize),
            prefill(16, head_size=head_size, itemsize=itemsize),
            prefill(1024, head_size=head_size, itemsize=itemsize),
            replace(prefill(1024, head_size=head_size, itemsize=itemsize), has_bias=True),
        ):
            tile = choose_config(shape, limits).tile
            assert tile.shared_memory_bytes(shape, limits) <= kib * KIB


def test_amd_tiles_fit_its_local_memory() -> None:
    limits = DeviceLimits("hip", 942, 64 * KIB, 304)
    for head_size, itemsize in itertools.product(HEAD_SIZES, (2, 4)):
        for shape in (decode(8, 4096, head_size=head_size, itemsize=itemsize), prefill(512, head_size=head_size)):
            tile = choose_config(shape, limits).tile
            assert tile.shared_memory_bytes(shape, limits) <= 64 * KIB


def test_a_device_without_room_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match="no attention tile for head size 256"):
        choose_config(decode(1, 128, head_size=256, itemsize=4), DeviceLimits("cuda", 80, 8 * KIB, 4))


H100 = DeviceLimits("cuda", 90, 227 * KIB, 132)


def test_tiles_grow_with_the_rows_of_a_run() -> None:
    assert choose_config(decode(64, 2048), H100).tile.block_m == 16
    assert choose_config(prefill(16), H100).tile.block_m == 64
    assert choose_config(prefill(1024), H100).tile.block_m == 128
    assert choose_config(prefill(1024), DeviceLimits("cuda", 80, 163 * KIB, 108)).tile.block_m == 64


def test_few_rows_with_long_contexts_are_split_until_the_device_is_busy() -> None:
    config = choose_config(decode(1, 32768), H100)
    assert config.num_splits * 8 >= H100.num_sms
    assert choose_config(decode(256, 1024), H100).num_splits == 1
    assert choose_config(decode(1, 100), H100).num_splits == 1


@pytest.mark.parametrize("num_seqs", [1, 3, 16, 100, 256])
@pytest.mark.parametrize("kv_len", [1, 127, 128, 1000, 1024, 9999, 131072])
def test_splits_cover_the_keys_and_none_is_empty(num_seqs: int, kv_len: int) -> None:
    config = choose_config(decode(num_seqs, kv_len), H100)
    assert config.num_splits * config.split_len >= kv_len
    assert (config.num_splits - 1) * config.split_len < kv_len


def test_shrinking_takes_less_each_time_and_ends() -> None:
    config = choose_config(prefill(1024), H100)
    sizes = []
    while config is not None:
        sizes.append(config.tile.shared_memory_bytes(prefill(1024), H100))
        config = config.shrunk()
    assert sizes == sorted(set(sizes), reverse=True)
    assert len(sizes) > 3


@pytest.mark.parametrize("queries_per_kv", [1, 3, 7, 8, 48, 71])
@pytest.mark.parametrize("block_m", [16, 64])
def test_the_tile_bound_holds_every_run(queries_per_kv: int, block_m: int) -> None:
    """`attention_kernel` starts run i at tile `start * queries_per_kv // block_m + i`."""
    query_lens = [1, 5, 64, 1, 1, 33, 2]
    starts = list(itertools.accumulate(query_lens, initial=0))
    shape = LaunchShape(len(query_lens), starts[-1], max(query_lens), 4096, 2, queries_per_kv, 64, 2)
    assert not one_tile_per_run(shape, block_m) or queries_per_kv * 64 <= block_m
    first_tiles = [start * queries_per_kv // block_m + i for i, start in enumerate(starts)]
    for query_len, first, after in zip(query_lens, first_tiles, first_tiles[1:], strict=False):
        assert after - first >= -(-query_len * queries_per_kv // block_m)
    assert num_tiles(shape, block_m) >= first_tiles[-1] - 1


def test_the_gate_costs_follow_the_device() -> None:
    slow = prefix_costs(DeviceLimits("cuda", 86, 99 * KIB, 84), num_heads=32, num_kv_heads=8, head_size=128, itemsize=2)
    fast = prefix_costs(H100, num_heads=32, num_kv_heads=8, head_size=128, itemsize=2)
    assert slow.launch < fast.launch  # in the time of a launch, fast memory reads more
    assert slow.merge == fast.merge == 4 * 4  # 4 query heads: 16 bytes an element against 4


def run_python(code: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_importing_the_backend_needs_no_gpu() -> None:
    """A kernel tuned at import would ask for a driver."""
    run_python("import pagedbatch_kernels.triton_backend")


def test_the_plans_need_neither_torch_nor_triton() -> None:
    names = "pagedbatch_kernels.launch, pagedbatch_kernels.prefix_groups"
    run_python(f"import sys, {names}; assert not {{'torch', 'triton'}} & set(sys.modules)")

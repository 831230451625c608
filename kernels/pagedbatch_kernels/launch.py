"""Chooses tiles, warps and splits of the Triton kernels for a batch's shape and a device's limits.

Pure numbers, without torch or triton. `make kernels-check` checks that every entry compiles without spills.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from pagedbatch_kernels.prefix_groups import PrefixCosts

MAX_HEAD_SIZE = 256
#: For NVIDIA's assembler, which otherwise spills a few registers on purpose to fit one more program on an SM.
MAX_REGISTERS = 255
_MIN_SPLIT_LEN = 128  # keys; a shorter split is mostly start-up
_MAX_SPLITS = 128
# In units of keys streamed by a program: its start-up before the first dot, and the launch of a merge.
_PROGRAM_START = 64
_MERGE_LAUNCH = 128


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """The limits of a device that `choose_config` needs."""

    backend: Literal["cuda", "hip"]
    capability: int  #: 80, 86, 90, 100; on AMD 942
    shared_memory_bytes: int  #: of one program
    num_sms: int

    @property
    def memory_bytes_per_us(self) -> int:
        """Approximate memory bandwidth; that of a workstation card for an unknown capability."""
        return {80: 1_900_000, 90: 4_000_000, 100: 7_000_000, 942: 5_000_000}.get(self.capability, 800_000)

    @property
    def wide_matrix_unit(self) -> bool:
        """Warp-group matrix instructions with operands in shared memory: Hopper and later."""
        return self.backend == "cuda" and self.capability >= 90


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """The shape of one pass: `num_runs` runs of query tokens, each with its own keys."""

    num_runs: int
    num_tokens: int
    max_query_len: int
    max_kv_len: int
    num_kv_heads: int
    queries_per_kv: int
    head_size: int
    itemsize: int  #: bytes of an element of query and cache
    has_bias: bool = False  #: by position

    @property
    def head_padded(self) -> int:
        return next_power_of_two(self.head_size)


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program holds at a time, with its warps and pipeline stages."""

    block_m: int  #: query rows
    block_n: int  #: keys
    num_warps: int
    num_stages: int

    def kv_buffers(self, backend: str) -> int:
        """Tiles of K (and of V) in flight. On NVIDIA half of the stages hold the block ids that the loads wait for."""
        return (self.num_stages - 1) // 2 if backend == "cuda" else max(0, self.num_stages - 2)

    def shared_memory_bytes(self, shape: LaunchShape, limits: DeviceLimits) -> int:
        """An upper bound of what the compiler uses; `make kernels-check` compares."""
        head_padded, itemsize = shape.head_padded, shape.itemsize
        query = self.block_m * head_padded * itemsize
        weights = self.block_m * self.block_n * itemsize
        kv_tile = self.block_n * head_padded * itemsize
        bias = self.block_m * self.block_n * 4 if shape.has_bias else 0
        buffers = self.kv_buffers(limits.backend)
        streamed = max(kv_tile, buffers * 2 * kv_tile) + max(1, buffers) * self.block_n * 4
        if limits.backend == "hip":  # the query goes to registers before the stream starts
            return max(query, streamed + weights + bias) + 1024
        if limits.wide_matrix_unit and self.block_m >= 64:  # dots in flight keep their operands: one more pair
            weights = max(weights, 2 * kv_tile)
        return query + weights + bias + streamed + 1024


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """How one pass is launched: its tile, and the keys of each run in `num_splits` parts of `split_len`."""

    tile: Tile
    num_splits: int
    split_len: int

    def shrunk(self) -> LaunchConfig | None:
        """The next smaller config, for a device that refused this one; None: there is none."""
        tile = self.tile
        if tile.num_stages > 1:
            return replace(self, tile=replace(tile, num_stages=max(1, tile.num_stages - 2)))
        if tile.block_m > 16:
            return replace(self, tile=replace(tile, block_m=16, num_warps=4))
        if tile.block_n > 16:
            return replace(self, tile=replace(tile, block_n=tile.block_n // 2))
        return None


def next_power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def num_tiles(shape: LaunchShape, block_m: int) -> int:
    """Query tiles of a pass: one per run if each run fits, else the upper bound that `attention_kernel` searches in."""
    if one_tile_per_run(shape, block_m):
        return shape.num_runs
    return shape.num_tokens * shape.queries_per_kv // block_m + shape.num_runs


def one_tile_per_run(shape: LaunchShape, block_m: int) -> bool:
    return shape.max_query_len * shape.queries_per_kv <= block_m


@lru_cache(maxsize=256)
def choose_config(shape: LaunchShape, limits: DeviceLimits) -> LaunchConfig:
    """The launch of one pass.

    Raises:
        ValueError: no tile fits the device's shared memory.
    """
    for tile in _tiles(shape, limits):
        if tile.shared_memory_bytes(shape, limits) <= limits.shared_memory_bytes:
            num_splits = _num_splits(shape, tile, limits)
            split_len = _ceil_div(_ceil_div(shape.max_kv_len, num_splits), tile.block_n) * tile.block_n
            return LaunchConfig(tile, _ceil_div(shape.max_kv_len, split_len), split_len)
    raise ValueError(
        f"no attention tile for head size {shape.head_size} with {shape.itemsize}-byte elements fits "
        f"{limits.shared_memory_bytes} bytes of shared memory"
    )


def prefix_costs(
    limits: DeviceLimits, *, num_heads: int, num_kv_heads: int, head_size: int, itemsize: int
) -> PrefixCosts:
    """What sharing prefixes costs and saves on this device, for one layer of a model.

    - A prefix that is read again comes mostly from the L2 cache, at a few times the memory bandwidth: `reread` 0.3.
    - Per query head, merging writes and reads a float32 partial result of the prefix and of the tail: 16 bytes per
      element, against `2 * itemsize` of a key and its value.
    - Two more launches take about 8 us.
    """
    queries_per_kv = num_heads // num_kv_heads
    token_bytes = 2 * head_size * itemsize
    shared_tile = 64 if itemsize == 2 else 16
    return PrefixCosts(
        queries_per_kv=queries_per_kv,
        plain_tile=16,
        shared_tile=shared_tile,
        reread=0.3,
        merge=queries_per_kv * 16 * head_size / token_bytes,
        launch=8 * limits.memory_bytes_per_us / (token_bytes * num_kv_heads),
    )


def _tiles(shape: LaunchShape, limits: DeviceLimits) -> list[Tile]:
    """Tiles for the shape, best first.

    The rows per run decide the height: decoding fills 16 rows at most and waits for memory, so small tiles with deep
    buffers; beyond that, tall tiles for the matrix units. float32 has no exact matrix instruction on NVIDIA and keeps
    small tiles. A bias takes registers, one per score.
    """
    rows_per_run = _ceil_div(shape.num_tokens * shape.queries_per_kv, max(1, shape.num_runs))
    narrow = shape.head_padded <= 128
    tall = rows_per_run > 16 and shape.itemsize == 2 and (narrow or not shape.has_bias)
    if limits.backend == "hip":
        tiles = [Tile(64, 32, 4, 3)] if tall else []
        tiles += [Tile(16, 64, 4, 3)] if narrow and shape.itemsize == 2 else []
        return [*tiles, Tile(16, 32, 4, 3), Tile(16, 16, 4, 3)]
    if shape.itemsize == 4:
        return [Tile(16, 16, 4, 5), Tile(16, 16, 4, 3)] if narrow else [Tile(16, 16, 8, 3), Tile(16, 16, 8, 1)]
    if narrow:
        tiles = [Tile(64, 32, 8, 3)] if tall else []
        if tall and (shape.head_padded <= 64 or not shape.has_bias):
            tiles = [Tile(64, 64, 8, 5), Tile(64, 64, 8, 3), *tiles]
        if tall and not shape.has_bias and limits.wide_matrix_unit and rows_per_run >= 256:
            tiles = [Tile(128, 64, 8, 5), Tile(128, 64, 8, 3), *tiles]
        return [*tiles, Tile(16, 64, 4, 5), Tile(16, 32, 4, 5), Tile(16, 32, 4, 3), Tile(16, 16, 4, 3)]
    tiles = [Tile(64, 32, 8, 3)] if tall else []
    if tall and limits.wide_matrix_unit:
        tiles = [Tile(64, 32, 8, 5), *tiles]
    return [*tiles, Tile(16, 32, 4, 5), Tile(16, 32, 4, 3), Tile(16, 16, 4, 3)]


def _num_splits(shape: LaunchShape, tile: Tile, limits: DeviceLimits) -> int:
    """The number of parts to cut the keys into, minimising the time of the longest program queue, in units of keys.

    A split adds programs, which helps while SMs are idle or the last wave is ragged. Each costs a start-up and the
    partial results of its rows: 8 bytes per element, written and read, against `2 * itemsize` of a key and its value.
    """
    programs = num_tiles(shape, tile.block_m) * shape.num_kv_heads
    resident = limits.shared_memory_bytes // tile.shared_memory_bytes(shape, limits)
    slots = limits.num_sms * min(max(1, resident), 16 // tile.num_warps)
    rows = min(tile.block_m, shape.max_query_len * shape.queries_per_kv)
    partial = rows * 4 // shape.itemsize

    def queue_time(num_splits: int) -> int:
        waves = _ceil_div(programs * num_splits, slots)
        merge = (waves * partial + _MERGE_LAUNCH) if num_splits > 1 else 0
        return waves * (_ceil_div(shape.max_kv_len, num_splits) + _PROGRAM_START) + merge

    max_splits = max(1, min(_MAX_SPLITS, shape.max_kv_len // _MIN_SPLIT_LEN))
    return min(range(1, max_splits + 1), key=queue_time)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)

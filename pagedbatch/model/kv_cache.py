"""The memory of the block pools: one KV cache on the device, one on the host for swapping; and their sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from pagedbatch_kernels.interface import Backend, CacheShape
from torch import Tensor

from pagedbatch.errors import UsageError
from pagedbatch.model.model_config import ModelConfig
from pagedbatch.model.transfer import to_device
from pagedbatch.step import BlockCopy

#: Share of the memory free after loading the weights that the pool may take; the rest is for activations, logits and
#: other processes.
FREE_MEMORY_SHARE = {"cpu": 0.5, "cuda": 0.85}

GIB = 1024**3


class KVCache:
    """`num_blocks` blocks on the device and `num_swap_blocks` on the host, in the backend's layout."""

    def __init__(
        self,
        backend: Backend,
        shape: CacheShape,
        num_blocks: int,
        num_swap_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._backend = backend
        self.shape = shape
        self.num_blocks = num_blocks
        self.num_swap_blocks = num_swap_blocks
        self.device_cache = self._allocate(num_blocks, dtype, device, "--num-blocks or --kv-memory")
        host = torch.device("cpu")
        self._host_cache = self._allocate(num_swap_blocks, dtype, host, "--swap-space", is_spare=True)

    def _allocate(
        self, num_blocks: int, dtype: torch.dtype, device: torch.device, flag: str, *, is_spare: bool = False
    ) -> Tensor:
        wanted, free = num_blocks * self.shape.block_bytes(dtype), free_memory(device)
        try:
            # Linux grants memory that it does not have, and kills the process that fills it.
            if device.type == "cpu" and wanted > free:
                raise MemoryError
            return self._backend.allocate_cache(self.shape, num_blocks, dtype, device, is_spare=is_spare)
        except (RuntimeError, MemoryError) as error:
            raise UsageError(
                f"no memory for {num_blocks} KV blocks ({wanted / GIB:.2f} GiB on {device.type}, "
                f"{free / GIB:.2f} GiB free): lower {flag}"
            ) from error

    def apply(self, swap_out: list[BlockCopy], swap_in: list[BlockCopy], copies: list[BlockCopy]) -> None:
        """Swaps blocks out before anything overwrites them, and in before anything reads them; then copies blocks."""
        device = self.device_cache.device
        if swap_out:
            self._backend.swap_blocks(self.device_cache, self._host_cache, *_ids(swap_out, device))
        if swap_in:
            self._backend.swap_blocks(self._host_cache, self.device_cache, *_ids(swap_in, device))
        if copies:
            self._backend.copy_blocks(self.device_cache, *_ids(copies, device))


def _ids(copies: list[BlockCopy], device: torch.device) -> tuple[Tensor, Tensor]:
    """Source and destination ids on the device; the host does not wait."""
    sources, targets = zip(*copies, strict=True)
    return to_device(sources, torch.int64, device), to_device(targets, torch.int64, device)


def free_memory(device: torch.device) -> int:
    """Bytes free on a device now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(min(psutil.virtual_memory().available, _container_memory(Path("/sys/fs/cgroup"))))


def _container_memory(cgroup: Path) -> float:
    """Bytes left of a container's limit (cgroup v2). File pages that the kernel can drop count as free."""
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(stat.get("inactive_file", 0)))
    except (OSError, ValueError):  # no container, or "max": no limit
        return math.inf


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Numbers of blocks on the device and on the host; `block_bytes` is a block's size over all layers."""

    num_blocks: int
    num_swap_blocks: int
    block_bytes: int


def choose_pool_size(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    max_model_len: int,
    block_size: int,
    num_blocks: int | None,
    kv_memory: int | None,
    swap_space: int,
    max_num_seqs: int,
    memory_share: float = 1.0,
    reserved_bytes: int = 0,
) -> PoolSize:
    """The sizes of the pools for a run of this model.

    Args:
        max_model_len, max_num_seqs: a pool whose size is not given holds at most this many sequences of this length.
        num_blocks, kv_memory, memory_share, reserved_bytes: as in `choose_num_blocks`.
        swap_space: bytes on the host.

    Raises:
        UsageError: not even one block fits.
    """
    block_bytes = config.cache_shape(block_size).block_bytes(dtype)
    num_pool_blocks = choose_num_blocks(
        block_bytes,
        device,
        num_blocks=num_blocks,
        kv_memory=kv_memory,
        max_useful=max_num_seqs * -(-max_model_len // block_size),
        memory_share=memory_share,
        reserved_bytes=reserved_bytes,
    )
    return PoolSize(num_pool_blocks, swap_space // block_bytes, block_bytes)


def choose_num_blocks(
    block_bytes: int,
    device: torch.device,
    *,
    num_blocks: int | None,
    kv_memory: int | None,
    max_useful: int,
    memory_share: float = 1.0,
    reserved_bytes: int = 0,
) -> int:
    """The size of the pool: as given, or what fits into a share of the free memory.

    Args:
        num_blocks: number of blocks, if given.
        kv_memory: bytes, if given.
        max_useful: limits a pool whose size is not given.
        memory_share: share of a CPU's free memory that may be used, where several pools share one machine.
        reserved_bytes: memory that is free now and won't be when the pool is allocated: for weights.

    Raises:
        UsageError: not even one block fits.
    """
    if num_blocks is not None:
        return num_blocks
    if kv_memory is not None:
        fitting = kv_memory // block_bytes
        if fitting < 1:
            raise UsageError(f"--kv-memory {kv_memory} bytes is less than one block ({block_bytes} bytes): raise it")
        return fitting
    share = FREE_MEMORY_SHARE[device.type] * (memory_share if device.type == "cpu" else 1.0)
    free = max(0, free_memory(device) - reserved_bytes)
    fitting = int(free * share) // block_bytes
    if fitting < 1:
        raise UsageError(
            f"no memory left for the KV pool: {free / GIB:.2f} GiB free on {device.type}, "
            f"one block takes {block_bytes} bytes; free some memory or set --num-blocks"
        )
    return min(fitting, max_useful)

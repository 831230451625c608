"""Allocates the memory of a CPU cache, in huge or small pages.

The system provides each page when it is first written, which took 6% of a 14 s job on a virtual machine. Populating the
first 512 MiB in the background (MADV_POPULATE_WRITE) saved no more in the first steps than it cost at the start.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor


def zeros(size: Sequence[int], dtype: torch.dtype, *, huge_pages: bool) -> Tensor:
    """A contiguous tensor of zeros. Where the system has no madvise for huge pages, it chooses the pages.

    Blocks are scattered, and with small pages most reads of a block would miss the TLB. But a cache that stays mostly
    unwritten takes less memory with small pages.

    Raises:
        MemoryError: there is no room for it.
    """
    num_bytes = math.prod(size) * dtype.itemsize
    if num_bytes == 0 or not hasattr(mmap, "MADV_HUGEPAGE"):
        return _torch_zeros(size, dtype)
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"no {num_bytes} bytes for the cache") from error
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(tuple(size))


def _torch_zeros(size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """
    Raises:
        MemoryError: there is no room for it.
    """
    try:
        return torch.zeros(tuple(size), dtype=dtype)
    except RuntimeError as error:
        raise MemoryError(str(error)) from error

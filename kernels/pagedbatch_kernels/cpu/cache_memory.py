"""Memory for a cache on a CPU, in huge pages or in small ones. Knows no blocks.

The system gives each page when it is first written; on a virtual machine that took 6% of a job of 14 s. Asking for the
first 512 MiB beforehand (MADV_POPULATE_WRITE, in the background) took as much off the first steps as it put on the
start, and small jobs only paid: so it is not done.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor


def zeros(size: Sequence[int], dtype: torch.dtype, *, huge_pages: bool) -> Tensor:
    """An array of zeros, contiguous; in pages of the system's choice where there are no huge ones to ask for.

    Blocks lie anywhere, and with small pages most reads of one would also have to look up its address. But a cache of
    which little may ever be written takes less memory with small ones.

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
    with contextlib.suppress(OSError):  # a kernel built without them
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

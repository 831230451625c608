"""Memory for the cache on a CPU: in huge pages, and the first of it there before it is written. Knows no blocks.

A system gives memory when it is first written, page by page; under virtualisation a page of 2 MiB can take 2 ms. Left
to the first prompts, that was a seventeenth of the time of a job of 14 s.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

#: Linux 5.14; Python has no name for it yet.
_MADV_POPULATE_WRITE = 23
#: Bytes asked for ahead, over all planes: what the first prompts fill, and little beside the weights of most models.
_AHEAD = 512 * 2**20


def huge_pages(size: Sequence[int], dtype: torch.dtype) -> Tensor | None:
    """An array of zeros, contiguous, or None where this system has no huge pages to ask for.

    Blocks lie anywhere, and with small pages most reads of one would also have to look up its address.

    Raises:
        MemoryError: there is no room for it.
    """
    num_bytes = math.prod(size) * dtype.itemsize
    if num_bytes == 0 or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"no {num_bytes} bytes for the cache") from error
    with contextlib.suppress(OSError):  # a kernel built without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(tuple(size))


def ask_ahead(cache: Tensor) -> None:
    """Has the system bring the beginning of each plane, in the background while others make the model ready.

    Args:
        cache: [num_layers, 2, ...] on the CPU, contiguous; a plane is what its first two dimensions number.
    """
    if cache.nbytes and hasattr(mmap, "MADV_HUGEPAGE"):
        threading.Thread(target=_populate, args=(cache, len(cache) * len(cache[0])), daemon=True).start()


def _populate(cache: Tensor, num_planes: int) -> None:
    """It holds no lock of Python's meanwhile. What the system can't or won't do now it does at the first write."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes, madvise.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    plane_bytes = cache.nbytes // num_planes
    for plane in range(num_planes):
        begin = cache.data_ptr() + plane * plane_bytes
        aligned = begin // mmap.PAGESIZE * mmap.PAGESIZE
        if madvise(aligned, begin - aligned + min(plane_bytes, _AHEAD // num_planes), _MADV_POPULATE_WRITE) != 0:
            return

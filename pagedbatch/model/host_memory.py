"""Limits the host memory that oneDNN, torch and malloc keep without needing it, beside weights and pool."""

from __future__ import annotations

import ctypes
import os

#: oneDNN compiles a GEMM for each number of tokens, in 1 ms, and caches it with its plan, 0.7 MB in all; torch caches
#: plans as well. A step needs up to ten, and the number of tokens changes from step to step: with the default capacity
#: of 1,024 each, the caches grew to 750 MB. 64 are enough for some six numbers of tokens.
_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}

#: From malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8

#: Freed memory that malloc keeps: in all, and the largest piece, for which this is the highest value that it takes.
_KEPT_BYTES, _KEPT_BYTES_EACH = 256 * 2**20, 32 * 2**20


def limit_caches() -> None:
    """Limits the caches of oneDNN and torch, and malloc's arenas. Call it before the first GEMM and the first thread.

    Variables that the environment sets already win. With one arena instead of one per thread, memory that the threads
    that load weights free is reused for the packed weights: in float32, that is the size of the model. A malloc that
    isn't glibc's has no arenas.
    """
    for name, capacity in _CACHES.items():
        os.environ.setdefault(name, capacity)
    _set("MALLOC_ARENA_MAX", _M_ARENA_MAX, 1)


def keep_activations() -> None:
    """Lets malloc keep the memory that a step frees for the next step. Call it when the weights are loaded.

    By default it returns most of it to the system, and each step then waits for thousands of page faults. Variables
    that the environment sets win here as well.
    """
    _set("MALLOC_TRIM_THRESHOLD_", _M_TRIM_THRESHOLD, _KEPT_BYTES)
    _set("MALLOC_MMAP_THRESHOLD_", _M_MMAP_THRESHOLD, _KEPT_BYTES_EACH)


def _set(variable: str, parameter: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if variable not in os.environ and mallopt is not None:
        mallopt(parameter, value)

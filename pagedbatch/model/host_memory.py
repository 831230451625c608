"""How much the libraries under a model keep of host memory that they no longer need. Knows no model.

All of it is memory beside weights and pool: it comes with the process, whatever the model's size.
"""

from __future__ import annotations

import ctypes
import os

#: A product of matrices is a kernel that oneDNN makes for the number of rows, in 1 ms, and keeps together with what it
#: planned, 0.7 MB in all; torch has a cache of plans besides. A step needs up to ten, and the number of rows changes
#: from step to step: by their own measure, 1,024 each, they grew to 750 MB. Kept are those of some six numbers of rows.
_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}

#: Of malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8

#: How much of what is given back malloc keeps: in all, and of a single piece, for which it allows no more than this.
_KEPT_BYTES, _KEPT_BYTES_EACH = 256 * 2**20, 32 * 2**20


def limit_caches() -> None:
    """Bounds what oneDNN and malloc keep. To be called before the first product, and before there are other threads.

    What the environment says already stands. With one arena in place of one a thread, what the threads that load
    weights give back is there for the packed ones: in float32, that is the size of the model. A malloc that isn't
    glibc's has no such arenas.
    """
    for name, capacity in _CACHES.items():
        os.environ.setdefault(name, capacity)
    _set("MALLOC_ARENA_MAX", _M_ARENA_MAX, 1)


def keep_activations() -> None:
    """Lets malloc keep what a step gives back, as the next one asks for it again. To be called when weights are loaded.

    Left to itself it returns most of it to the system, and each step then waits for thousands of pages. The environment
    decides here as well.
    """
    _set("MALLOC_TRIM_THRESHOLD_", _M_TRIM_THRESHOLD, _KEPT_BYTES)
    _set("MALLOC_MMAP_THRESHOLD_", _M_MMAP_THRESHOLD, _KEPT_BYTES_EACH)


def _set(variable: str, parameter: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if variable not in os.environ and mallopt is not None:
        mallopt(parameter, value)

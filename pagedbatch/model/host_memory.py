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

_M_ARENA_MAX = -8  #: of malloc.h


def keep_little() -> None:
    """Bounds what oneDNN and malloc keep. To be called before the first product, and before there are other threads.

    What the environment says already stands. With one arena in place of one a thread, what the threads that load
    weights give back is there for the packed ones: in float32, that is the size of the model. A malloc that isn't
    glibc's has no such arenas.
    """
    for name, capacity in _CACHES.items():
        os.environ.setdefault(name, capacity)
    if "MALLOC_ARENA_MAX" not in os.environ:
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_M_ARENA_MAX, 1)

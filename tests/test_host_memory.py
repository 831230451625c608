"""What oneDNN and malloc may keep, each asked in a process of its own: both read their limits once."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

MALLOC_INFO = """
import ctypes
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in
                ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "used", "free", "keepcost")]
libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
"""

GEMMS = """
import torch
weight = torch.ops.mkldnn._reorder_linear_weight(torch.ones(32, 32), 16)
def used_after(numbers_of_tokens):
    for num_tokens in numbers_of_tokens:
        torch.ops.mkldnn._linear_pointwise(torch.ones(num_tokens, 32), weight, None, "none", [], "")
    return libc.mallinfo2().used
first = used_after(range(1, 101))
print((used_after(range(101, 301)) - first) // 2**20)
"""

ARENAS = """
import os, tempfile, threading
thread = threading.Thread(target=bytearray, args=[100_000])
thread.start()
thread.join()
libc.fopen.restype = ctypes.c_void_p
with tempfile.NamedTemporaryFile() as file:
    stream = ctypes.c_void_p(libc.fopen(file.name.encode(), b"w"))
    libc.malloc_info(0, stream)
    libc.fclose(stream)
    print(file.read().count(b"<heap nr"))
"""

#: Pages that the system gives anew for 4 MiB that was just given back.
PAGES = """
import resource
from pagedbatch.model.host_memory import keep_activations
keep_activations()
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
def use():
    pieces = [libc.malloc(2**20) for _ in range(4)]
    for piece in pieces:
        libc.memset(piece, 1, 2**20)
    for piece in reversed(pieces):
        libc.free(piece)
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def number_printed_by(code: str, **environment: str) -> int:
    """What a process prints that runs `code` after `limit_caches`; skips where malloc isn't glibc's."""
    code = f"{MALLOC_INFO}\nfrom pagedbatch.model.host_memory import limit_caches\nlimit_caches()\n{code}"
    kept = {name: value for name, value in os.environ.items() if "CACHE_CAPACITY" not in name and "MALLOC" not in name}
    done = subprocess.run([sys.executable, "-c", code], env=kept | environment, capture_output=True, text=True)
    if "mallinfo2" in done.stderr:
        pytest.skip("this malloc doesn't tell what is used")
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_gemms_of_ever_new_numbers_of_tokens_stay_within_bounds() -> None:
    import torch

    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        pytest.skip("this torch has no oneDNN")
    unbounded = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1024", "LRU_CACHE_CAPACITY": "1024"}
    assert number_printed_by(GEMMS, **unbounded) >= 10  # what the environment says stands
    assert number_printed_by(GEMMS) <= 1


def test_what_a_thread_gives_back_is_there_for_the_others() -> None:
    assert number_printed_by(ARENAS, MALLOC_ARENA_MAX="8") == 2  # what the environment says stands
    assert number_printed_by(ARENAS) == 1


def test_what_a_step_gives_back_is_there_for_the_next() -> None:
    thresholds = {"MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"}
    assert number_printed_by(PAGES, **thresholds) >= 1000  # what the environment says stands
    assert number_printed_by(PAGES) < 100

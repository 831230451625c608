"""Memory for the cache on a CPU: zeros, and the beginning of each plane there before it is written."""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from collections.abc import Callable

import pytest
import torch
from pagedbatch_kernels.cpu import cache_memory as module
from pagedbatch_kernels.cpu.cache_memory import ask_ahead, huge_pages

MIB = 2**20

pytestmark = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="no huge pages on this system")


class RightNow(threading.Thread):
    """A thread that has ended once it is started."""

    def start(self) -> None:
        super().start()
        self.join()


def test_it_is_an_array_of_zeros_that_can_be_written() -> None:
    cache = huge_pages((3, 2, 5, 7), torch.bfloat16)

    assert cache is not None
    assert cache.shape == (3, 2, 5, 7)
    assert cache.dtype == torch.bfloat16
    assert cache.is_contiguous()
    assert not cache.any()
    cache.fill_(2.0)
    assert cache.sum() == 2 * 3 * 2 * 5 * 7


def test_an_empty_one_is_left_to_the_caller() -> None:
    assert huge_pages((3, 2, 0, 7), torch.float32) is None


def test_the_beginning_of_each_plane_is_there_and_its_end_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    if not _system_can_populate():
        pytest.skip("this kernel has no MADV_POPULATE_WRITE")
    monkeypatch.setattr(module.threading, "Thread", RightNow)
    monkeypatch.setattr(module, "_AHEAD", 2 * MIB)

    cache = huge_pages((1, 2, 8 * MIB), torch.uint8)

    assert cache is not None
    assert not _is_resident(cache.data_ptr())
    ask_ahead(cache)
    for plane in cache[0]:
        assert _is_resident(plane.data_ptr())
        assert _is_resident(plane.data_ptr() + MIB - mmap.PAGESIZE)
        assert not _is_resident(plane.data_ptr() + 8 * MIB - mmap.PAGESIZE)


def test_a_small_one_is_asked_for_to_its_end_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(module.threading, "Thread", RightNow)
    monkeypatch.setattr(
        module.ctypes, "CDLL", lambda _: _Library(lambda begin, size, _: asked.append((begin, size)) or 0)
    )

    cache = huge_pages((1, 2, 3000), torch.uint8)

    assert cache is not None
    ask_ahead(cache)
    begin = cache.data_ptr()
    assert asked == [(begin, 3000), (begin, 6000)]  # the second plane's page begins with the first plane


class _Library:
    def __init__(self, madvise: Callable[[int, int, int], int]) -> None:
        self.madvise = madvise


def _system_can_populate() -> bool:
    if sys.platform != "linux":
        return False
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    madvise = ctypes.CDLL(None).madvise
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return bool(madvise(ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE), 23) == 0)


def _is_resident(address: int) -> bool:
    """Whether the page at `address` is in memory, as mincore(2) has it."""
    page = address // mmap.PAGESIZE * mmap.PAGESIZE
    state = ctypes.c_ubyte()
    done = ctypes.CDLL(None).mincore(ctypes.c_void_p(page), ctypes.c_size_t(1), ctypes.byref(state))
    assert done == 0
    return bool(state.value & 1)


def test_an_empty_pool_asks_for_nothing() -> None:
    ask_ahead(torch.empty(0, 2, 0))
    ask_ahead(torch.empty(3, 2, 0))

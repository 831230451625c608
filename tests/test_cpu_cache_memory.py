"""Memory for a cache on a CPU: an array of zeros like any other, that takes memory where it is written."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch
from pagedbatch_kernels.cpu.cache_memory import zeros

pytestmark = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="no huge pages on this system")


@pytest.mark.parametrize("huge_pages", [True, False])
def test_it_is_an_array_of_zeros_that_can_be_written(huge_pages: bool) -> None:
    cache = zeros((3, 2, 5, 7), torch.bfloat16, huge_pages=huge_pages)

    assert cache.shape == (3, 2, 5, 7)
    assert cache.dtype == torch.bfloat16
    assert cache.is_contiguous()
    assert not cache.any()
    cache.fill_(2.0)
    assert cache.sum() == 2 * 3 * 2 * 5 * 7


def test_an_empty_one() -> None:
    assert zeros((3, 2, 0, 7), torch.float32, huge_pages=True).shape == (3, 2, 0, 7)


def test_without_huge_pages_to_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    assert zeros((3, 2), torch.float32, huge_pages=True).tolist() == [[0.0, 0.0]] * 3
    with pytest.raises(MemoryError):
        zeros((2**50,), torch.float32, huge_pages=True)


@pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="this system doesn't tell which pages there are")
def test_in_small_pages_it_takes_what_is_written() -> None:
    planes, plane_bytes = 60, 4 << 20
    cache = zeros((planes, plane_bytes), torch.int8, huge_pages=False)
    cache[:, : 3 * mmap.PAGESIZE] = 1  # a block or two in each layer
    with open("/proc/self/pagemap", "rb") as pagemap:  # 8 bytes a page, their highest bit: it is in memory (proc(5))
        pagemap.seek(cache.data_ptr() // mmap.PAGESIZE * 8)
        pages = torch.frombuffer(bytearray(pagemap.read(planes * plane_bytes // mmap.PAGESIZE * 8)), dtype=torch.int64)
    assert int((pages < 0).sum()) <= planes * 4

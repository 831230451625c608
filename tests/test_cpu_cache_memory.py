"""Memory for the cache on a CPU: an array of zeros like any other."""

from __future__ import annotations

import mmap

import pytest
import torch
from pagedbatch_kernels.cpu.cache_memory import huge_pages

pytestmark = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="no huge pages on this system")


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

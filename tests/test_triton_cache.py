"""The Triton cache kernels against the torch reference, on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from pagedbatch_kernels import reference, triton_backend
from pagedbatch_kernels.interface import CacheShape
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPE = CacheShape(num_layers=3, block_size=8, num_kv_heads=3, head_size=20)  # no power of two anywhere
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def filled_cache(num_blocks: int, dtype: torch.dtype, device: torch.device = DEVICE, seed: int = 0) -> Tensor:
    cache = triton_backend.allocate_cache(SHAPE, num_blocks, dtype, device)
    return cache.copy_(torch.randn(cache.shape, generator=torch.Generator().manual_seed(seed)))


def test_the_layout_is_the_reference_s() -> None:
    """So that torch can take over a run in the middle, cache and all."""
    ours = triton_backend.allocate_cache(SHAPE, 4, torch.float16, DEVICE)
    theirs = reference.allocate_cache(SHAPE, 4, torch.float16, DEVICE)
    assert (ours.shape, ours.stride(), ours.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
    assert ours[:, :, 0].numel() * ours.element_size() == SHAPE.block_bytes(torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_write_kv_scatters_tokens(dtype: torch.dtype) -> None:
    cache = filled_cache(5, dtype)
    expected = cache.clone()
    # As a model hands them over: heads before tokens, key and value with strides of their own.
    key = torch.randn(3, 7, 20, device=DEVICE).to(dtype).transpose(0, 1)
    value = torch.randn(7, 3, 40, device=DEVICE).to(dtype)[..., 20:]
    slots = torch.tensor([39, 0, 7, 8, 17, 16, 23], device=DEVICE)
    triton_backend.write_kv(key, value, cache[1], slots)
    reference.write_kv(key, value, expected[1], slots)
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copy_blocks_copies_all_layers(dtype: torch.dtype) -> None:
    cache = filled_cache(6, dtype)
    expected = cache.clone()
    src, dst = torch.tensor([4, 4, 1], device=DEVICE), torch.tensor([0, 5, 2], device=DEVICE)
    triton_backend.copy_blocks(cache, src, dst)
    reference.copy_blocks(expected, src, dst)
    assert torch.equal(cache, expected)
    assert not torch.equal(cache[:, :, 0], filled_cache(6, dtype)[:, :, 0])


def test_copy_of_a_block_larger_than_one_program() -> None:
    shape = CacheShape(num_layers=1, block_size=32, num_kv_heads=2, head_size=80)
    cache = triton_backend.allocate_cache(shape, 3, torch.float32, DEVICE)
    cache.copy_(torch.randn(cache.shape))
    triton_backend.copy_blocks(cache, torch.tensor([2], device=DEVICE), torch.tensor([0], device=DEVICE))
    assert torch.equal(cache[:, :, 0], cache[:, :, 2])


def test_swap_out_and_in_again() -> None:
    device_cache = filled_cache(6, torch.bfloat16)
    host_cache = filled_cache(3, torch.bfloat16, torch.device("cpu"), seed=1)
    before, host_before = device_cache.clone(), host_cache.clone()
    triton_backend.swap_blocks(device_cache, host_cache, torch.tensor([5, 2]), torch.tensor([0, 2]))
    device_cache[:, :, [5, 2]] = 0
    triton_backend.swap_blocks(host_cache, device_cache, torch.tensor([0, 2]), torch.tensor([1, 4]))
    assert torch.equal(device_cache[:, :, [1, 4]], before[:, :, [5, 2]])
    assert torch.equal(host_cache[:, :, 1], host_before[:, :, 1])
    assert torch.equal(device_cache[:, :, [0, 3]], before[:, :, [0, 3]])


def test_nothing_to_copy_launches_nothing() -> None:
    cache = filled_cache(2, torch.float32)
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    triton_backend.copy_blocks(cache, none, none)
    assert torch.equal(cache, filled_cache(2, torch.float32))


def test_tensors_that_do_not_fit_are_refused() -> None:
    cache = filled_cache(2, torch.float32)
    key = torch.zeros(4, 3, 20, device=DEVICE)
    slots = torch.arange(4, device=DEVICE)
    with pytest.raises(ValueError, match="do not fit together"):
        triton_backend.write_kv(key, key[:3], cache[0], slots)
    with pytest.raises(ValueError, match="one dtype"):
        triton_backend.write_kv(key.half(), key.half(), cache[0], slots)
    wide = torch.zeros(4, 3, 40, device=DEVICE)[..., ::2]
    with pytest.raises(ValueError, match="contiguous"):
        triton_backend.write_kv(wide, wide, cache[0], slots)
    with pytest.raises(ValueError, match="different blocks"):
        triton_backend.swap_blocks(cache, cache[..., :10], slots, slots)
    with pytest.raises(ValueError, match="int64"):
        triton_backend.copy_blocks(cache, slots.int(), slots.int())
    with pytest.raises(ValueError, match="caches must be contiguous"):
        triton_backend.copy_blocks(cache[:, :, ::2], slots[:1], slots[:1])

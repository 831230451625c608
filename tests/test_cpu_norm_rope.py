"""The CPU's norms and rotations against the same formulas in torch."""

from __future__ import annotations

import pytest
import torch
from pagedbatch_kernels.cpu.backend import CpuBackend
from pagedbatch_kernels.cpu.build import can_load
from pagedbatch_kernels.cpu.norm_rope import NormRope
from pagedbatch_kernels.interface import CacheShape
from torch import Tensor
from torch.nn.functional import layer_norm

pytestmark = pytest.mark.skipif(not can_load(), reason="there is no C++ compiler here")

#: Rounding once of what is computed in float32: half a unit in the last of 8 bits, or of 24 after a few sums.
TOLERANCE = {torch.bfloat16: {"rtol": 2**-8, "atol": 1e-6}, torch.float32: {"rtol": 1e-5, "atol": 1e-6}}
DTYPES = list(TOLERANCE)


@pytest.fixture(scope="module")
def ops() -> NormRope:
    return NormRope()


def normed(values: Tensor, weight: Tensor | None) -> Tensor:
    values = values.float()
    if weight is None:
        return values
    return values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.float()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 15, 64, 577])
def test_rms_norm(ops: NormRope, dtype: torch.dtype, size: int) -> None:
    values, weight = torch.randn(9, size).to(dtype), torch.randn(size).to(dtype)
    torch.testing.assert_close(ops.rms_norm(values, weight, 1e-5).float(), normed(values, weight), **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 15, 64, 577])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("mean", [0.0, 50.0])
def test_layer_norm(ops: NormRope, dtype: torch.dtype, size: int, has_bias: bool, mean: float) -> None:
    values, (weight, bias) = (torch.randn(9, size) + mean).to(dtype), torch.randn(2, size).to(dtype)
    expected = layer_norm(values.double(), (size,), weight.double(), bias.double() if has_bias else None, eps=1e-5)
    found = ops.layer_norm(values, weight, bias if has_bias else None, 1e-5)
    # Centring cancels digits of float32, as many as the mean is large.
    tolerance = {**TOLERANCE[dtype], "atol": 1e-6 * max(mean, 2.0)}
    torch.testing.assert_close(found.double(), expected, **tolerance)
    assert found.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_size", [2, 34, 64])
@pytest.mark.parametrize("rotates", [True, False])
@pytest.mark.parametrize("has_norms", [True, False])
def test_rope_and_write_kv(ops: NormRope, dtype: torch.dtype, head_size: int, rotates: bool, has_norms: bool) -> None:
    num_heads, num_kv_heads, slots = 6, 2, torch.tensor([33, 0, 17, 5, 47])
    qkv = torch.randn(len(slots), num_heads + 2 * num_kv_heads, head_size).to(dtype)
    cache = torch.full((2, 6, 8, num_kv_heads, head_size), 7.0, dtype=dtype)
    cos, sin = torch.randn(2, len(slots), head_size).to(dtype)
    norms = torch.randn(2, head_size).to(dtype) if has_norms else (None, None)

    def rotated(heads: Tensor, norm: Tensor | None) -> Tensor:
        heads = normed(heads, norm)
        if not rotates:
            return heads
        first, second = heads.chunk(2, dim=-1)
        halves = torch.cat([-second, first], dim=-1)
        return heads * cos.float().unsqueeze(1) + halves * sin.float().unsqueeze(1)

    queries, keys, values = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    expected_queries, expected_keys = rotated(queries, norms[0]), rotated(keys, norms[1])
    values = values.clone()
    ops.rope_and_write_kv(
        qkv, cache, slots, (cos, sin) if rotates else None, q_norm=norms[0], k_norm=norms[1], epsilon=1e-5
    )
    # A difference of two products may cancel: what is left is off by the rounding of the products.
    tolerance = {**TOLERANCE[dtype], "atol": 1e-5}
    stored = cache.view(2, 48, num_kv_heads, head_size)
    torch.testing.assert_close(qkv[:, :num_heads].float(), expected_queries, **tolerance)
    torch.testing.assert_close(stored[0, slots].float(), expected_keys, **tolerance)
    assert torch.equal(stored[1, slots], values)
    untouched = torch.ones(48, dtype=torch.bool)
    untouched[slots] = False
    assert (stored[:, untouched] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 48])
def test_a_packed_cache_gets_the_same(ops: NormRope, dtype: torch.dtype, block_size: int) -> None:
    """Enough tokens for two threads, neighbours among them, which share words of V; other slots stay as they were."""
    head_size, num_heads, num_kv_heads, num_blocks = 32, 6, 2, 20
    slots = torch.cat([torch.arange(100, 150), torch.randperm(100)[:40], torch.tensor([num_blocks * block_size - 1])])
    qkv = torch.randn(len(slots), num_heads + 2 * num_kv_heads, head_size).to(dtype)
    rotation = torch.randn(2, len(slots), head_size).to(dtype)
    rows = torch.full((2, num_blocks, block_size, num_kv_heads, head_size), 7.0, dtype=dtype)
    backend = CpuBackend()
    shape = CacheShape(2, block_size, num_kv_heads, head_size)
    packed, expected = backend.allocate_cache(shape, num_blocks, dtype, torch.device("cpu")).fill_(7.0)

    ops.rope_and_write_kv(qkv.clone(), rows, slots, (rotation[0], rotation[1]))
    ops.rope_and_write_kv(qkv.clone(), packed, slots, (rotation[0], rotation[1]))

    backend.write_kv(*rows.flatten(1, 2), expected, torch.arange(num_blocks * block_size))
    assert packed.dim() == rows.dim() + 1
    assert torch.equal(packed, expected)


def test_a_row_is_the_same_in_any_batch(ops: NormRope) -> None:
    values, weight = torch.randn(500, 576), torch.randn(576)
    bias = torch.randn(576)
    for dtype in DTYPES:
        tensors = [each.to(dtype) for each in (values, weight, bias)]
        for norm, parameters in ((ops.rms_norm, tensors[1:2]), (ops.layer_norm, tensors[1:])):
            alone = torch.cat([norm(row.unsqueeze(0), *parameters, 1e-5) for row in tensors[0]])
            assert torch.equal(norm(tensors[0], *parameters, 1e-5), alone)


def test_a_slot_outside_the_cache_writes_nothing(ops: NormRope) -> None:
    qkv, cache = torch.randn(2, 4, 8), torch.zeros(2, 3, 4, 1, 8)
    before = qkv.clone()
    for slot in (-1, 12):
        with pytest.raises(IndexError, match="outside the 12"):
            ops.rope_and_write_kv(qkv, cache, torch.tensor([0, slot]), None)
    assert torch.equal(qkv, before)
    assert not cache.any()


def test_what_does_not_fit_is_refused(ops: NormRope) -> None:
    with pytest.raises(ValueError, match="expected contiguous"):
        ops.rms_norm(torch.randn(2, 8), torch.randn(7), 1e-5)
    with pytest.raises(ValueError, match="expected contiguous"):
        ops.rms_norm(torch.randn(8, 4).T, torch.randn(8), 1e-5)
    with pytest.raises(ValueError, match="expected contiguous"):
        ops.layer_norm(torch.randn(2, 8), torch.randn(8), torch.randn(8).bfloat16(), 1e-5)
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        ops.rms_norm(torch.randn(2, 8).half(), torch.randn(8).half(), 1e-5)
    with pytest.raises(ValueError, match="expected a cache of"):
        ops.rope_and_write_kv(torch.randn(2, 4, 8), torch.zeros(2, 3, 4, 1, 8).bfloat16(), torch.tensor([0, 1]), None)
    with pytest.raises(ValueError, match="head size 8, 16 in the cache"):
        ops.rope_and_write_kv(torch.randn(2, 4, 8), torch.zeros(2, 3, 4, 1, 16), torch.tensor([0, 1]), None)

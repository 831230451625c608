"""A token that is NaN or infinite changes no bit of the others': the CPU's GEMMs, norms, RoPE, cache writes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from bad_rows import NUM_ROWS, SIZES, with_one_bad_row
from pagedbatch_kernels.cpu.backend import CpuBackend
from pagedbatch_kernels.cpu.build import can_load
from pagedbatch_kernels.cpu.gemm import PackedGemm
from pagedbatch_kernels.cpu.norm_rope import NormRope
from pagedbatch_kernels.interface import CacheShape
from torch import Tensor, nn

from pagedbatch.model.packed_linear import Linears, OneDnnLinears, PackedLinears

pytestmark = pytest.mark.skipif(not can_load(), reason="there is no C++ compiler here")

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def check(compute: Callable[[Tensor], Tensor], hidden: Tensor) -> None:
    """The others' results are those of a batch without a bad token; its own shows that it is one."""
    good = compute(hidden.clone())
    assert good.isfinite().all()
    for mixed, bad, others in with_one_bad_row(hidden):
        found = compute(mixed)
        assert torch.equal(found[others], good[others])
        assert not found[bad].isfinite().all()


def linears(name: str, dtype: torch.dtype) -> Linears:
    if name == "panels":
        return PackedLinears(PackedGemm())
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no GEMM of bfloat16 on this CPU")
    return OneDnnLinears()


def layer(size: int, width: int, dtype: torch.dtype, *, has_bias: bool = False) -> nn.Linear:
    return nn.Linear(size, width, bias=has_bias).requires_grad_(False).to(dtype)


@DTYPES
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["panels", "onednn"])
def test_gemms(name: str, size: int, dtype: torch.dtype) -> None:
    if name == "panels" and dtype == torch.bfloat16:
        size += size % 2  # whole words
    made = linears(name, dtype)
    for width in (1, 17, 70):
        linear = made.linear(layer(size, width, dtype), layer(size, 3, dtype, has_bias=True), keep=True)
        gate, up = layer(size, width, dtype), layer(size, width, dtype, has_bias=True)
        swiglu = made.gated(gate, up, "silu", keep=True)
        for num_tokens in NUM_ROWS:
            hidden = torch.randn(num_tokens, size).to(dtype)
            residual = torch.randn(num_tokens, width + 3).to(dtype)
            check(linear, hidden)
            check(swiglu, hidden)
            check(lambda hidden, linear=linear, residual=residual: linear(hidden, residual.clone()), hidden)
            check(lambda residual, linear=linear, hidden=hidden: linear(hidden.clone(), residual), residual)


@DTYPES
@pytest.mark.parametrize("size", SIZES)
def test_norms(size: int, dtype: torch.dtype) -> None:
    ops, weight = NormRope(), torch.randn(size).to(dtype)
    for num_tokens in NUM_ROWS:
        check(lambda hidden: ops.rms_norm(hidden, weight, 1e-5), torch.randn(num_tokens, size).to(dtype))


@DTYPES
@pytest.mark.parametrize("head_size", [2, 24, 34, 64])
@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize("block_size", [5, 16])
def test_rotations_and_what_they_write(head_size: int, dtype: torch.dtype, has_norms: bool, block_size: int) -> None:
    """Queries in place; keys and values, read back through attention of each token to itself."""
    num_tokens, num_heads, num_kv_heads = 37, 4, 2
    ops, backend = NormRope(), CpuBackend()
    shape = CacheShape(1, block_size, num_kv_heads, head_size)
    cosine, sine = torch.randn(2, num_tokens, head_size).to(dtype)
    norms = torch.randn(2, head_size).to(dtype) if has_norms else (None, None)
    slots = torch.randperm(num_tokens + 9)[:num_tokens]

    def write(qkv: Tensor) -> Tensor:
        """The queries, and all that the cache holds, one token per line."""
        qkv = qkv.view(num_tokens, num_heads + 2 * num_kv_heads, head_size)
        cache = backend.allocate_cache(shape, 12, dtype, torch.device("cpu"))[0].zero_()
        ops.rope_and_write_kv(qkv, cache, slots, (cosine, sine), q_norm=norms[0], k_norm=norms[1], epsilon=1e-5)
        stored = [
            per_slot(part, block_size, num_kv_heads, head_size, keys)
            for part, keys in zip(cache, (True, False), strict=True)
        ]
        return torch.cat([qkv[:, :num_heads].flatten(1), *(hidden[slots] for hidden in stored)], dim=1)

    check(write, torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_size).to(dtype))


def per_slot(blocks: Tensor, block_size: int, num_kv_heads: int, head_size: int, are_keys: bool) -> Tensor:
    """Keys or values of a layer's cache: [num_slots, num_kv_heads * head_size], whichever way it is laid out."""
    num_blocks = len(blocks)
    if blocks.dim() == 5:  # packed: see layer_cache.h
        words = blocks.shape[-1]
        if are_keys:
            keys = blocks.reshape(num_blocks, num_kv_heads, head_size // words, block_size, words)
            blocks = keys.permute(0, 3, 1, 2, 4)
        else:
            blocks = blocks.permute(0, 2, 4, 1, 3)
    return blocks.reshape(num_blocks * block_size, num_kv_heads * head_size)

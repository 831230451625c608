"""The paged cache on Triton: writes a step's K/V, copies blocks, and moves them to and from host memory.

The layout is that of `reference`, which can then take over a run with the cache as it is. One head of one slot is
usually 128 bytes or more, whole memory transactions, and the KV heads of a slot are adjacent: a token's K is written in
one piece, and the programs of one tile's heads read neighbouring bytes at the same time.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagedbatch_kernels.launch import next_power_of_two

_COPY_ELEMENTS = 4096  # of one program of the block copy


@triton.jit
def _write_kv_kernel(
    key_ptr,  # [num_tokens, num_kv_heads, HEAD_SIZE]
    value_ptr,  # like key_ptr, strides of its own
    key_cache_ptr,  # [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_SIZE]
    value_cache_ptr,  # like key_cache_ptr, same strides
    slot_mapping_ptr,  # int64 [num_tokens]
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    stride_block,
    stride_slot,
    stride_kv_head,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEADS_PADDED: tl.constexpr,  # next power of two
    HEAD_PADDED: tl.constexpr,  # next power of two
):
    """Grid: (num_tokens,)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    head, dim = tl.arange(0, HEADS_PADDED)[:, None].to(tl.int64), tl.arange(0, HEAD_PADDED)[None, :]
    ok = (head < NUM_KV_HEADS) & (dim < HEAD_SIZE)
    target = slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_slot + head * stride_kv_head + dim
    key = tl.load(key_ptr + token * stride_key_token + head * stride_key_head + dim, mask=ok)
    value = tl.load(value_ptr + token * stride_value_token + head * stride_value_head + dim, mask=ok, other=0.0)
    is_finite = tl.min((tl.abs(value.to(tl.float32)) < float("inf")).to(tl.int32), 1, keep_dims=True) == 1
    tl.store(key_cache_ptr + target, tl.where(is_finite, key, float("nan")), mask=ok)
    tl.store(value_cache_ptr + target, tl.where(is_finite, value, 0.0), mask=ok)


@triton.jit
def _copy_blocks_kernel(
    source_ptr,  # [num_planes, source blocks, block_elements]: a plane is one layer's K or V
    target_ptr,  # [num_planes, target blocks, block_elements]
    source_ids_ptr,  # int64 [num_copies]
    target_ids_ptr,  # int64 [num_copies]
    stride_source_plane,
    stride_target_plane,
    block_elements,
    ELEMENTS: tl.constexpr,
):
    """Grid: (num_copies, num_planes, ceil(block_elements / ELEMENTS))."""
    copy = tl.program_id(0)
    plane = tl.program_id(1).to(tl.int64)
    element = tl.program_id(2) * ELEMENTS + tl.arange(0, ELEMENTS)
    ok = element < block_elements
    source = plane * stride_source_plane + tl.load(source_ids_ptr + copy) * block_elements + element
    target = plane * stride_target_plane + tl.load(target_ids_ptr + copy) * block_elements + element
    tl.store(target_ptr + target, tl.load(source_ptr + source, mask=ok), mask=ok)


def write_kv(key: Tensor, value: Tensor, layer_cache: Tensor, slot_mapping: Tensor) -> None:
    """See `interface.Backend.write_kv`.

    Raises:
        ValueError: tensors that do not fit together.
    """
    num_tokens, num_kv_heads, head_size = key.shape
    if value.shape != key.shape or layer_cache.shape[3:] != key.shape[1:] or slot_mapping.shape != (num_tokens,):
        raise ValueError(
            f"key {tuple(key.shape)}, value {tuple(value.shape)}, slots {tuple(slot_mapping.shape)} and cache "
            f"{tuple(layer_cache.shape)} do not fit together"
        )
    if not key.dtype == value.dtype == layer_cache.dtype or slot_mapping.dtype != torch.int64:
        raise ValueError("key, value and cache must have one dtype, and slots be int64")
    if key.stride(2) != 1 or value.stride(2) != 1 or layer_cache.stride(-1) != 1:
        raise ValueError("key, value and cache must be contiguous in the head dimension")
    key_cache, value_cache = layer_cache
    _write_kv_kernel[(num_tokens,)](
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        key_cache.stride(0),
        key_cache.stride(1),
        key_cache.stride(2),
        BLOCK_SIZE=key_cache.shape[1],
        NUM_KV_HEADS=num_kv_heads,
        HEAD_SIZE=head_size,
        HEADS_PADDED=next_power_of_two(num_kv_heads),
        HEAD_PADDED=next_power_of_two(head_size),
    )


def copy_blocks(cache: Tensor, src: Tensor, dst: Tensor) -> None:
    """See `interface.Backend.copy_blocks`."""
    _copy(cache, cache, src, dst)


def swap_blocks(src_cache: Tensor, dst_cache: Tensor, src: Tensor, dst: Tensor) -> None:
    """See `interface.Backend.swap_blocks`.

    One launch: the GPU itself reads or writes the pinned host cache in whole lines, where a copy engine would need one
    small transfer per block, layer and plane. Asynchronous, in order with the other work of the current stream.
    """
    device = dst_cache.device if src_cache.device.type == "cpu" else src_cache.device
    _copy(src_cache, dst_cache, src.to(device, non_blocking=True), dst.to(device, non_blocking=True))


def _copy(source: Tensor, target: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
    num_layers, two, _, *block = source.shape
    if target.shape[:2] != source.shape[:2] or target.shape[3:] != source.shape[3:] or target.dtype != source.dtype:
        raise ValueError(f"caches {tuple(source.shape)} and {tuple(target.shape)} hold different blocks")
    if not (source.is_contiguous() and target.is_contiguous()):
        raise ValueError("caches must be contiguous")
    if source_ids.shape != target_ids.shape or source_ids.dtype != torch.int64 or target_ids.dtype != torch.int64:
        raise ValueError("block ids must be two int64 lists of one length")
    if not len(source_ids):
        return
    block_elements = torch.Size(block).numel()
    _copy_blocks_kernel[(len(source_ids), num_layers * two, triton.cdiv(block_elements, _COPY_ELEMENTS))](
        source,
        target,
        source_ids,
        target_ids,
        source.stride(1),
        target.stride(1),
        block_elements,
        ELEMENTS=min(_COPY_ELEMENTS, next_power_of_two(block_elements)),
    )

"""How the CPU backend lays out its cache, and what its functions read off a tensor of it.

One of two ways; layer_cache.h has both to the bit. Packed, where the sizes allow it: a block's K and V then lie as the
attention kernel multiplies them. All layers of a block lie together, so that blocks fill memory one after the other and
one is copied in one piece. Else like the reference's cache, and the kernel packs one chunk of tokens after the other.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable

import torch
from torch import Tensor

from pagedbatch_kernels.interface import CacheShape

#: Block size and head size are multiples of it in a packed cache: words of a cache line, and no fewer than the lanes of
#: any register.
_UNIT = 16


class LayerCache(ctypes.Structure):
    """A layer's cache: `pagedbatch::LayerCache` of layer_cache.h, field by field."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_blocks", "block_stride", "value_offset")),
        *((name, ctypes.c_int32) for name in ("block_size", "num_kv_heads", "head_size", "is_packed")),
    )

    @classmethod
    def of(cls, layer_cache: Tensor, head_size: int) -> LayerCache:
        """
        Raises:
            ValueError: it is no layer of a cache of heads of that size on the CPU.
        """
        is_packed = layer_cache.dim() == 6
        if is_packed:
            _, num_blocks, num_kv_heads, words, size, tokens_per_word = layer_cache.shape
            block_size = words * tokens_per_word
        else:
            _, num_blocks, block_size, num_kv_heads, size = layer_cache.shape
        if size != head_size:
            raise ValueError(f"head size {head_size}, {size} in the cache")
        if not layer_cache[0, :1].is_contiguous() or layer_cache.device.type != "cpu":
            raise ValueError("the cache of a layer is not contiguous in its blocks, or not on the CPU")
        value_offset, block_stride = layer_cache.stride()[:2]
        sizes = (num_blocks, block_stride, value_offset, block_size, num_kv_heads, head_size)
        return cls(layer_cache.data_ptr(), *sizes, is_packed)


def empty_cache(shape: CacheShape, num_blocks: int, dtype: torch.dtype, allocate: Callable[..., Tensor]) -> Tensor:
    """A cache whose memory `allocate` gives for a size. float16 is left to the reference, so it has that layout.

    Returns:
        [num_layers, 2, num_blocks, block_size, num_kv_heads, head_size], or, packed and with w tokens in 32 bits,
        [num_layers, 2, num_blocks, num_kv_heads, block_size / w, head_size, w]: V's layout, and K takes as much room.
    """
    if shape.block_size % _UNIT or shape.head_size % _UNIT or dtype == torch.float16:
        return allocate((shape.num_layers, 2, num_blocks, shape.block_size, shape.num_kv_heads, shape.head_size))
    per_word = 4 // dtype.itemsize
    block = (shape.num_kv_heads, shape.block_size // per_word, shape.head_size, per_word)
    return allocate((num_blocks, shape.num_layers, 2, *block)).permute(1, 2, 0, 3, 4, 5, 6)


def planes(cache: Tensor) -> tuple[int, int]:
    """How many stretches of memory hold a cache, in each of them its blocks in order, and the bytes of a block in one.

    Raises:
        ValueError: it is laid out in neither way.
    """
    is_packed = cache.dim() == 7
    blocks = cache.movedim(2, 0) if is_packed else cache[0, 0]
    if not (blocks if is_packed else cache).is_contiguous():
        raise ValueError(f"no cache of the CPU backend's: {list(cache.shape)}, strides {list(cache.stride())}")
    return 1 if is_packed else 2 * len(cache), math.prod(blocks.shape[1:]) * cache.itemsize

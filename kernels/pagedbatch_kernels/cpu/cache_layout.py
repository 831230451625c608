"""The two layouts of the CPU backend's cache; layer_cache.h defines both to the bit.

Packed, if block size and head size allow it: K and V lie as the attention kernel reads them, and all layers of a block
lie together, so that blocks fill memory one after the other and one is copied in one piece. Otherwise the layout of the
reference backend, and the kernel packs chunks of tokens as it reads them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from pagedbatch_kernels.cpu.library import LayerCache
from pagedbatch_kernels.interface import CacheShape

#: Block size and head size of a packed cache are multiples of it: a cache line of packed elements, and at least the
#: lanes of a register.
_UNIT = 16


def layer_cache_struct(layer_cache: Tensor, head_size: int) -> LayerCache:
    """What C++ needs to know of one layer of a cache.

    Raises:
        ValueError: it is no layer of a cache of heads of that size on the CPU.
    """
    is_packed = layer_cache.dim() == 6
    if is_packed:
        _, num_blocks, num_kv_heads, packed_tokens, size, pair = layer_cache.shape
        block_size = packed_tokens * pair
    else:
        _, num_blocks, block_size, num_kv_heads, size = layer_cache.shape
    if size != head_size:
        raise ValueError(f"head size {head_size}, {size} in the cache")
    if not layer_cache[0, :1].is_contiguous() or layer_cache.device.type != "cpu":
        raise ValueError("the cache of a layer is not contiguous in its blocks, or not on the CPU")
    value_offset, block_stride = layer_cache.stride()[:2]
    sizes = (num_blocks, block_stride, value_offset, block_size, num_kv_heads, head_size)
    return LayerCache(layer_cache.data_ptr(), *sizes, is_packed)


def empty_cache(shape: CacheShape, num_blocks: int, dtype: torch.dtype, allocate: Callable[..., Tensor]) -> Tensor:
    """A cache in memory from `allocate(size)`. float16 has the reference's layout, since the reference computes it.

    Returns:
        [num_layers, 2, num_blocks, block_size, num_kv_heads, head_size], or, packed with p values in 32 bits,
        [num_layers, 2, num_blocks, num_kv_heads, block_size / p, head_size, p]: V's layout; K has the same size.
    """
    if shape.block_size % _UNIT or shape.head_size % _UNIT or dtype == torch.float16:
        return allocate((shape.num_layers, 2, num_blocks, shape.block_size, shape.num_kv_heads, shape.head_size))
    pair = 4 // dtype.itemsize
    block = (shape.num_kv_heads, shape.block_size // pair, shape.head_size, pair)
    return allocate((num_blocks, shape.num_layers, 2, *block)).permute(1, 2, 0, 3, 4, 5, 6)


def planes(cache: Tensor) -> tuple[int, int]:
    """The number of contiguous planes that a cache consists of, each [num_blocks, block_bytes], and `block_bytes`.

    Raises:
        ValueError: it has neither layout.
    """
    is_packed = cache.dim() == 7
    blocks = cache.movedim(2, 0) if is_packed else cache[0, 0]
    if not (blocks if is_packed else cache).is_contiguous():
        raise ValueError(f"no cache of the CPU backend's: {list(cache.shape)}, strides {list(cache.stride())}")
    return 1 if is_packed else 2 * len(cache), math.prod(blocks.shape[1:]) * cache.itemsize

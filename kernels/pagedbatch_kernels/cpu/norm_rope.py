"""RMS norm, layer norm, and RoPE with the write into the KV cache: norm_rope.cpp.

Float32 or bfloat16 throughout, contiguous. A token's result does not depend on its batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagedbatch_kernels.cpu.cache_layout import layer_cache_struct
from pagedbatch_kernels.cpu.library import RopeArgs, is_bfloat16, load_kernels, pointer


class NormRope:
    """

    Raises:
        BuildError: it can't be built or loaded.
    """

    def __init__(self) -> None:
        self._library = load_kernels()

    def rms_norm(self, values: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """`values` [num_tokens, size] scaled to a mean square of 1, times `weight` [size] (arXiv 1910.07467).

        Raises:
            ValueError: the tensors don't fit each other.
        """
        num_tokens, size = values.shape
        dtype = values.dtype
        output = torch.empty_like(values)
        self._library.pagedbatch_rms_norm(
            pointer(values, dtype),
            pointer(weight, dtype, (size,)),
            output.data_ptr(),
            num_tokens,
            size,
            epsilon,
            is_bfloat16(values),
            torch.get_num_threads(),
        )
        return output

    def layer_norm(self, values: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
        """`values` [num_tokens, size] at mean 0 and variance 1, times `weight` [size], plus `bias` [size].

        See arXiv 1607.06450. A residual is added by the product before it (`PackedGemm.matmul`).

        Raises:
            ValueError: the tensors don't fit each other.
        """
        num_tokens, size = values.shape
        dtype = values.dtype
        output = torch.empty_like(values)
        self._library.pagedbatch_layer_norm(
            pointer(values, dtype),
            pointer(weight, dtype, (size,)),
            None if bias is None else pointer(bias, dtype, (size,)),
            output.data_ptr(),
            num_tokens,
            size,
            epsilon,
            is_bfloat16(values),
            torch.get_num_threads(),
        )
        return output

    def rope_and_write_kv(
        self,
        qkv: Tensor,
        layer_cache: Tensor,
        slot_mapping: Tensor,
        cos_sin: tuple[Tensor, Tensor] | None,
        *,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        epsilon: float = 0.0,
    ) -> None:
        """Norms and rotates queries in place, and writes keys, norm and rotation applied, and values into the cache.

        Args:
            qkv: [num_tokens, num_heads + 2 * num_kv_heads, head_size]: queries, keys, values. Keys stay as they were.
            layer_cache: of `qkv`'s dtype; see `cache_layout`.
            slot_mapping: int64 [num_tokens].
            cos_sin: each [num_tokens, head_size]; None: no rotation.
            q_norm, k_norm: [head_size], weights of an RMS norm of each head; None: no norm.
            epsilon: of those norms.

        Raises:
            ValueError: shapes or dtypes that don't fit each other.
            IndexError: a slot outside the cache.
        """
        num_tokens, num_heads, head_size = qkv.shape
        dtype = qkv.dtype
        cache = layer_cache_struct(layer_cache, head_size)
        if layer_cache.dtype != dtype:
            raise ValueError(f"expected a cache of {dtype}, got {layer_cache.dtype}")
        cos, sin = (None, None) if cos_sin is None else (pointer(x, dtype, (num_tokens, head_size)) for x in cos_sin)
        args = RopeArgs(
            qkv=pointer(qkv, dtype),
            cos=cos,
            sin=sin,
            q_norm=None if q_norm is None else pointer(q_norm, dtype, (head_size,)),
            k_norm=None if k_norm is None else pointer(k_norm, dtype, (head_size,)),
            slots=pointer(slot_mapping, torch.int64, (num_tokens,)),
            cache=cache,
            num_tokens=num_tokens,
            num_heads=num_heads - 2 * cache.num_kv_heads,
            epsilon=epsilon,
            is_bfloat16=is_bfloat16(qkv),
            num_threads=torch.get_num_threads(),
        )
        if not self._library.pagedbatch_rope_and_write_kv(args):
            raise IndexError(f"a slot lies outside the {cache.num_blocks * cache.block_size} of the cache")

"""What stands between a decoder's matrix products on a CPU: norms and rotations, by the library that `build` makes.

Float32 or bfloat16 throughout, contiguous, one row a token. A row's result doesn't depend on the other rows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from pagedbatch_kernels.cpu.build import load_library
from pagedbatch_kernels.cpu.cache_layout import LayerCache
from pagedbatch_kernels.cpu.tensors import check, is_bfloat16


class Rotation(ctypes.Structure):
    """The arguments of `rope_and_write_kv`: `pagedbatch::Rotation` of layers.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("qkv", "cosine", "sine")),
        *((name, ctypes.c_void_p) for name in ("query_norm", "key_norm", "slots")),
        ("cache", LayerCache),
        ("num_tokens", ctypes.c_int64),
        ("num_heads", ctypes.c_int32),
        ("epsilon", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("is_bfloat16", "num_threads")),
    )


class NormRope:
    """The functions of one loaded library.

    Args:
        notice: takes one line when the library has to be built first.

    Raises:
        BuildError: there is none and it can't be built.
    """

    def __init__(self, notice: Callable[[str], None]) -> None:
        library = load_library(notice)
        self._rms_norm = library.pagedbatch_rms_norm
        self._rms_norm.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 2 + [ctypes.c_float] + [ctypes.c_int32] * 2
        self._rms_norm.restype = None
        self._rotate_and_store = library.pagedbatch_rotate_and_store
        self._rotate_and_store.argtypes = [ctypes.POINTER(Rotation)]
        self._rotate_and_store.restype = ctypes.c_bool

    def rms_norm(self, values: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Rows of `values` [num_tokens, size] with a mean square of 1, times `weight` [size] (arXiv 1910.07467).

        Raises:
            ValueError: the tensors don't fit each other.
        """
        num_rows, size = values.shape
        check(values, values.dtype, (num_rows, size))
        check(weight, values.dtype, (size,))
        result = torch.empty_like(values)
        self._rms_norm(
            values.data_ptr(),
            weight.data_ptr(),
            result.data_ptr(),
            num_rows,
            size,
            epsilon,
            is_bfloat16(values),
            torch.get_num_threads(),
        )
        return result

    def rope_and_write_kv(
        self,
        qkv: Tensor,
        layer_cache: Tensor,
        slot_mapping: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        *,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        epsilon: float = 0.0,
    ) -> None:
        """Norms and rotates queries in place, and writes keys, treated alike, and values into the cache.

        Args:
            qkv: [num_tokens, num_heads + 2 * num_kv_heads, head_size]: queries, keys, values. Keys stay as they were.
            layer_cache: of `qkv`'s dtype; see `cache_layout`.
            slot_mapping: int64 [num_tokens].
            rotation: cosines and sines, each [num_tokens, head_size]; None: positions are not encoded.
            q_norm, k_norm: [head_size], weights of an RMS norm of each head; None: there is none.
            epsilon: of those norms.

        Raises:
            ValueError: shapes or dtypes that don't fit each other.
            IndexError: a slot outside the cache.
        """
        num_tokens, width, head_size = qkv.shape
        check(qkv, qkv.dtype, (num_tokens, width, head_size))
        cache = LayerCache.of(layer_cache, head_size)
        if layer_cache.dtype != qkv.dtype:
            raise ValueError(f"expected a cache of {qkv.dtype}, got {layer_cache.dtype}")
        check(slot_mapping, torch.int64, (num_tokens,))
        for table in rotation or ():
            check(table, qkv.dtype, (num_tokens, head_size))
        for norm in (q_norm, k_norm):
            if norm is not None:
                check(norm, qkv.dtype, (head_size,))
        inside = self._rotate_and_store(
            ctypes.byref(
                Rotation(
                    qkv=qkv.data_ptr(),
                    cosine=None if rotation is None else rotation[0].data_ptr(),
                    sine=None if rotation is None else rotation[1].data_ptr(),
                    query_norm=None if q_norm is None else q_norm.data_ptr(),
                    key_norm=None if k_norm is None else k_norm.data_ptr(),
                    slots=slot_mapping.data_ptr(),
                    cache=cache,
                    num_tokens=num_tokens,
                    num_heads=width - 2 * cache.num_kv_heads,
                    epsilon=epsilon,
                    is_bfloat16=is_bfloat16(qkv),
                    num_threads=torch.get_num_threads(),
                )
            )
        )
        if not inside:
            raise IndexError(f"a slot lies outside the {cache.num_blocks * cache.block_size} of the cache")

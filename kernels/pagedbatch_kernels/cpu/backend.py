"""The CPU backend: the functions of `interface.Backend`, by the library that `build` makes.

A row's result is the same bits whatever its batch, the number of threads, and whether its prefix is shared: see
attention.cpp. float16 is left to the reference.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from pagedbatch_kernels import reference
from pagedbatch_kernels.cpu.build import load_library
from pagedbatch_kernels.cpu.cache_layout import LayerCache, empty_cache, planes
from pagedbatch_kernels.cpu.cache_memory import zeros
from pagedbatch_kernels.interface import AttentionBatch, AttentionShape, CacheShape, SharedPrefixes
from pagedbatch_kernels.prefix_groups import PrefixCosts

_CHUNK = 64  #: of chunk.h: a prefix is shared as far as it fills whole chunks
_TILE_ROWS = 64  #: FEW_ROWS of attention.cpp, what a decode step's pieces have
_NO_WINDOW = 2**31 - 1  #: of step.h


class Step(ctypes.Structure):
    """The arguments of an attention call: `pagedbatch::Step` of step.h, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "output", "sinks")),
        ("cache", LayerCache),
        *((name, ctypes.c_void_p) for name in ("block_tables", "seq_lens", "query_starts")),
        *((name, ctypes.c_void_p) for name in ("prefix_tables", "prefix_lens", "run_starts", "seq_prefix_lens")),
        *((name, ctypes.c_int64) for name in ("token_stride", "head_stride")),
        *((name, ctypes.c_int64) for name in ("table_width", "prefix_table_width")),
        *((name, ctypes.c_int32) for name in ("num_seqs", "num_runs", "num_tokens")),
        *((name, ctypes.c_int32) for name in ("num_heads", "window")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
        *((name, ctypes.c_int32) for name in ("is_bfloat16", "num_threads")),
    )


class Rows(ctypes.Structure):
    """Keys and values to write: `pagedbatch::Rows` of cache.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "values", "slots")),
        *((name, ctypes.c_int64) for name in ("num_rows", "key_stride", "key_head_stride")),
        *((name, ctypes.c_int64) for name in ("value_stride", "value_head_stride")),
    )


class CpuBackend:
    """The kernels of one loaded library.

    Args:
        notice: takes one line when the library has to be built first.

    Raises:
        BuildError: there is none and it can't be built.
    """

    def __init__(self, notice: Callable[[str], None]) -> None:
        library = load_library(notice)
        self._attend = library.pagedbatch_attention
        self._attend.argtypes, self._attend.restype = [ctypes.POINTER(Step)], None
        self._write_rows = library.pagedbatch_write_rows
        self._write_rows.argtypes = [ctypes.POINTER(Rows), ctypes.POINTER(LayerCache), *[ctypes.c_int32] * 2]
        self._write_rows.restype = ctypes.c_bool
        self._copy_blocks = library.pagedbatch_copy_blocks
        self._copy_blocks.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 5
        self._copy_blocks.restype = ctypes.c_bool

    def allocate_cache(
        self,
        shape: CacheShape,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        is_spare: bool = False,
    ) -> Tensor:
        """See `interface.Backend.allocate_cache`.

        Raises:
            MemoryError: there is no room for it.
        """
        return empty_cache(shape, num_blocks, dtype, partial(zeros, dtype=dtype, huge_pages=not is_spare))

    def prefix_costs(self, attention: AttentionShape, device: torch.device) -> PrefixCosts:
        """See `interface.Backend.prefix_costs`.

        The weights are from runs with 2 to 8 rows a prefix of 64 to 1,024 tokens: what they let through was faster.
        """
        return PrefixCosts(
            queries_per_kv=attention.num_heads // attention.num_kv_heads,
            plain_tile=_TILE_ROWS,
            shared_tile=_TILE_ROWS,
            reread=0.5,
            merge=4.0,
            launch=2300.0,
        )

    def write_kv(self, key: Tensor, value: Tensor, layer_cache: Tensor, slot_mapping: Tensor) -> None:
        """See `interface.Backend.write_kv`.

        Raises:
            ValueError: shapes or dtypes that don't fit each other.
            IndexError: a slot outside the cache.
        """
        cache, dtype = LayerCache.of(layer_cache, key.shape[2]), layer_cache.dtype
        shape = (len(slot_mapping), cache.num_kv_heads, cache.head_size)
        for rows in (key, value):
            if rows.shape != shape or rows.dtype != dtype:
                raise ValueError(f"K or V is {rows.dtype} {list(rows.shape)}, for a {dtype} cache {list(shape)}")
        key, value = (rows if rows.stride(2) == 1 else rows.contiguous() for rows in (key, value))
        arguments = Rows(
            keys=key.data_ptr(),
            values=value.data_ptr(),
            slots=_pointer(slot_mapping, torch.int64),
            num_rows=len(slot_mapping),
            key_stride=key.stride(0),
            key_head_stride=key.stride(1),
            value_stride=value.stride(0),
            value_head_stride=value.stride(1),
        )
        is_half = dtype == torch.bfloat16, dtype == torch.float16
        if not self._write_rows(ctypes.byref(arguments), ctypes.byref(cache), *is_half):
            raise IndexError(f"a slot lies outside the {cache.num_blocks * cache.block_size} of the cache")

    def paged_attention(
        self,
        query: Tensor,
        layer_cache: Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `interface.Backend.paged_attention`.

        Raises:
            ValueError: shapes or dtypes that don't fit each other.
        """
        if query.dtype == torch.float16:
            return reference.paged_attention(
                query, layer_cache, batch, scale=scale, sliding_window=sliding_window, softcap=softcap, sinks=sinks
            )
        num_tokens, num_heads, head_size = query.shape
        cache = LayerCache.of(layer_cache, head_size)
        _check(query, layer_cache, cache.num_kv_heads, batch, sinks)
        query = query if query.stride(2) == 1 else query.contiguous()
        sinks = None if sinks is None else sinks.float().contiguous()
        output = torch.empty((num_tokens, num_heads, head_size), dtype=query.dtype)
        step = Step(
            query=query.data_ptr(),
            output=output.data_ptr(),
            sinks=None if sinks is None else sinks.data_ptr(),
            cache=cache,
            block_tables=_pointer(batch.block_tables, torch.int32),
            seq_lens=_pointer(batch.seq_lens, torch.int32),
            query_starts=_pointer(batch.query_start_loc, torch.int32),
            token_stride=query.stride(0),
            head_stride=query.stride(1),
            table_width=batch.block_tables.shape[1],
            num_seqs=len(batch.seq_lens),
            num_tokens=num_tokens,
            num_heads=num_heads,
            window=_NO_WINDOW if sliding_window is None else min(sliding_window, _NO_WINDOW),
            scale=scale,
            softcap=softcap or 0.0,
            is_bfloat16=query.dtype == torch.bfloat16,
            num_threads=torch.get_num_threads(),
        )
        shared = batch.shared_prefixes
        # A window that cuts into a prefix gives each row its own share of it.
        if shared is not None and (sliding_window is None or sliding_window >= batch.max_seq_len):
            _add_prefixes(step, shared)
        self._attend(ctypes.byref(step))
        return output

    def copy_blocks(self, cache: Tensor, src: Tensor, dst: Tensor) -> None:
        """See `interface.Backend.copy_blocks`.

        Raises:
            IndexError: a block outside the cache.
        """
        self.swap_blocks(cache, cache, src, dst)

    def swap_blocks(self, src_cache: Tensor, dst_cache: Tensor, src: Tensor, dst: Tensor) -> None:
        """See `interface.Backend.swap_blocks`.

        Raises:
            ValueError: the caches, or the lists, don't fit each other.
            IndexError: a block outside its cache.
        """
        num_planes, block_bytes = planes(src_cache)
        src_blocks, dst_blocks = src_cache.shape[2], dst_cache.shape[2]
        if (num_planes, block_bytes) != planes(dst_cache) or src_cache.dtype != dst_cache.dtype:
            raise ValueError(f"caches of {list(src_cache.shape)} and {list(dst_cache.shape)} hold different blocks")
        if len(src) != len(dst):
            raise ValueError(f"{len(src)} blocks for {len(dst)} places")
        inside = self._copy_blocks(
            src_cache.data_ptr(),
            dst_cache.data_ptr(),
            _pointer(src, torch.int64),
            _pointer(dst, torch.int64),
            len(src),
            num_planes,
            src_blocks,
            dst_blocks,
            block_bytes,
        )
        if not inside:
            raise IndexError(f"a block lies outside a cache of {src_blocks} or {dst_blocks}")


def _add_prefixes(step: Step, shared: SharedPrefixes) -> None:
    if shared.max_prefix_len < _CHUNK:
        return
    step.prefix_tables = _pointer(shared.block_tables, torch.int32)
    step.prefix_lens = _pointer(shared.prefix_lens, torch.int32)
    step.run_starts = _pointer(shared.query_start_loc, torch.int32)
    step.seq_prefix_lens = _pointer(shared.seq_prefix_lens, torch.int32)
    step.prefix_table_width = shared.block_tables.shape[1]
    step.num_runs = len(shared.prefix_lens)


def _pointer(tensor: Tensor, dtype: torch.dtype) -> int:
    """The address of a contiguous tensor of that dtype on the CPU.

    Raises:
        ValueError: it is another kind of tensor.
    """
    if tensor.dtype != dtype or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(f"expected contiguous {dtype} on the CPU, got {tensor.dtype} {list(tensor.shape)}")
    return tensor.data_ptr()


def _check(query: Tensor, layer_cache: Tensor, num_kv_heads: int, batch: AttentionBatch, sinks: Tensor | None) -> None:
    """
    Raises:
        ValueError: the tensors don't fit each other.
    """
    num_heads = query.shape[1]
    if query.dtype not in (torch.float32, torch.bfloat16) or query.dtype != layer_cache.dtype:
        raise ValueError(f"query is {query.dtype}, the cache {layer_cache.dtype}: both float32 or both bfloat16")
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads are no multiple of {num_kv_heads} KV heads")
    if sinks is not None and sinks.shape != (num_heads,):
        raise ValueError(f"sinks {list(sinks.shape)} for {num_heads} query heads")
    if not len(batch.query_start_loc) - 1 == len(batch.seq_lens) == len(batch.block_tables):
        raise ValueError("query_start_loc, seq_lens and block_tables disagree on the number of sequences")

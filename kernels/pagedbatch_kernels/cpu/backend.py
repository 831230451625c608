"""The CPU backend: `interface.Backend` by attention.cpp and cache.cpp. float16 is left to the reference.

A sequence's bits depend neither on its batch, nor on the number of threads, nor on whether its prefix is shared.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from pagedbatch_kernels import reference
from pagedbatch_kernels.cpu.cache_layout import empty_cache, layer_cache_struct, planes
from pagedbatch_kernels.cpu.cache_memory import zeros
from pagedbatch_kernels.cpu.library import AttentionArgs, WriteKvArgs, load_kernels, pointer
from pagedbatch_kernels.interface import AttentionBatch, AttentionShape, CacheShape, SharedPrefixes
from pagedbatch_kernels.prefix_groups import PrefixCosts

_ITEM_ROWS = 64  #: MIN_ITEM_ROWS of attention.cpp, the size of a decode step's work items
_NO_WINDOW = 2**31 - 1  #: of attention_args.h


class CpuBackend:
    """

    Raises:
        BuildError: it can't be built or loaded.
    """

    def __init__(self) -> None:
        self._library = load_kernels()

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

        Measured with 2 to 8 sequences per prefix of 64 to 1,024 tokens: what these costs let through was faster.
        """
        return PrefixCosts(
            queries_per_kv=attention.num_heads // attention.num_kv_heads,
            plain_tile=_ITEM_ROWS,
            shared_tile=_ITEM_ROWS,
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
        cache, dtype = layer_cache_struct(layer_cache, key.shape[2]), layer_cache.dtype
        shape = (len(slot_mapping), cache.num_kv_heads, cache.head_size)
        for each in (key, value):
            if each.shape != shape or each.dtype != dtype:
                raise ValueError(f"K or V is {each.dtype} {list(each.shape)}, for a {dtype} cache {list(shape)}")
        key, value = (each if each.stride(2) == 1 else each.contiguous() for each in (key, value))
        args = WriteKvArgs(
            key=key.data_ptr(),
            value=value.data_ptr(),
            slots=pointer(slot_mapping, torch.int64),
            cache=cache,
            num_tokens=len(slot_mapping),
            key_stride=key.stride(0),
            key_head_stride=key.stride(1),
            value_stride=value.stride(0),
            value_head_stride=value.stride(1),
            is_bfloat16=dtype == torch.bfloat16,
            is_float16=dtype == torch.float16,
        )
        if not self._library.pagedbatch_write_kv(args):
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
        position_bias: Tensor | None = None,
    ) -> Tensor:
        """See `interface.Backend.paged_attention`.

        Raises:
            ValueError: shapes or dtypes that don't fit each other.
        """
        if query.dtype == torch.float16:
            return reference.paged_attention(
                query,
                layer_cache,
                batch,
                scale=scale,
                sliding_window=sliding_window,
                softcap=softcap,
                sinks=sinks,
                position_bias=position_bias,
            )
        num_tokens, num_heads, head_size = query.shape
        cache = layer_cache_struct(layer_cache, head_size)
        _check(query, layer_cache, cache.num_kv_heads, batch, sinks)
        batch.check_mask(num_heads, sliding_window, position_bias)
        query = query if query.stride(2) == 1 else query.contiguous()
        sinks = None if sinks is None else sinks.float().contiguous()
        output = torch.empty((num_tokens, num_heads, head_size), dtype=query.dtype)
        args = AttentionArgs(
            query=query.data_ptr(),
            output=output.data_ptr(),
            sinks=None if sinks is None else sinks.data_ptr(),
            position_bias=None if position_bias is None else pointer(position_bias, torch.float32),
            cache=cache,
            block_tables=pointer(batch.block_tables, torch.int32),
            seq_lens=pointer(batch.seq_lens, torch.int32),
            query_start_loc=pointer(batch.query_start_loc, torch.int32),
            token_stride=query.stride(0),
            head_stride=query.stride(1),
            table_width=batch.block_tables.shape[1],
            num_seqs=len(batch.seq_lens),
            num_tokens=num_tokens,
            num_heads=num_heads,
            window=_NO_WINDOW if sliding_window is None else min(sliding_window, _NO_WINDOW),
            bias_reach=0 if position_bias is None else (position_bias.shape[1] + 1) // 2,
            scale=scale,
            softcap=softcap or 0.0,
            is_causal=batch.causal,
            is_bfloat16=query.dtype == torch.bfloat16,
            num_threads=torch.get_num_threads(),
        )
        shared = batch.prefixes_for(sliding_window, position_bias)
        if shared is not None:
            _add_prefixes(args, shared)
        self._library.pagedbatch_attention(args)
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
            raise ValueError(f"{len(src)} source blocks for {len(dst)} destinations")
        inside = self._library.pagedbatch_copy_blocks(
            src_cache.data_ptr(),
            dst_cache.data_ptr(),
            pointer(src, torch.int64),
            pointer(dst, torch.int64),
            len(src),
            num_planes,
            src_blocks,
            dst_blocks,
            block_bytes,
        )
        if not inside:
            raise IndexError(f"a block lies outside a cache of {src_blocks} or {dst_blocks}")


def _add_prefixes(args: AttentionArgs, shared: SharedPrefixes) -> None:
    args.prefix_tables = pointer(shared.block_tables, torch.int32)
    args.prefix_lens = pointer(shared.prefix_lens, torch.int32)
    args.prefix_start_loc = pointer(shared.query_start_loc, torch.int32)
    args.seq_prefix_lens = pointer(shared.seq_prefix_lens, torch.int32)
    args.prefix_table_width = shared.block_tables.shape[1]
    args.num_prefixes = len(shared.prefix_lens)


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

"""Paged attention on Triton: checks the tensors, cuts the step into passes, launches the kernels.

Without shared prefixes a step is one pass over each sequence's keys. With them it is two passes of the same kernel:
over the prefixes, where a whole run of sequences is one tall query, then over the rest of each sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from pagedbatch_kernels.interface import AttentionBatch
from pagedbatch_kernels.launch import (
    MAX_HEAD_SIZE,
    MAX_REGISTERS,
    LaunchConfig,
    LaunchShape,
    choose_config,
    next_power_of_two,
    num_tiles,
    one_tile_per_run,
)
from pagedbatch_kernels.triton_attention_kernels import attention_kernel, merge_kernel
from pagedbatch_kernels.triton_device import device_limits

_COMPILE_OPTIONS = {} if torch.version.hip is not None else {"maxnreg": MAX_REGISTERS}


@dataclass(frozen=True, slots=True)
class AttentionPass:
    """What one launch of `attention_kernel` reads: the step's query tokens cut into runs, each with its own keys."""

    query_start_loc: Tensor  #: int32 [num_runs + 1]
    block_tables: Tensor  #: int32 [num_runs, max_blocks]
    kv_begin: Tensor | None  #: int32 [num_runs]
    kv_end: Tensor  #: int32 [num_runs]
    is_prefix: bool  #: the keys are a shared prefix, without the queries' own
    causal: bool  #: the queries are the last of the keys, and each sees the keys up to itself; otherwise all
    shape: LaunchShape


def paged_attention(
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
    """See `interface.Backend.paged_attention`; `layer_cache` is [2, num_blocks, block_size, num_kv_heads, head_size].

    Raises:
        ValueError: tensors that do not fit together, or a head size or device that no tile serves.
    """
    check_arguments(query, layer_cache, batch, sinks)
    batch.check_mask(query.shape[1], sliding_window, position_bias)
    passes = plan_passes(query, layer_cache, batch, sliding_window, position_bias)
    limits = device_limits(query.device)
    configs = [choose_config(one.shape, limits) for one in passes]
    return attend(query, layer_cache, passes, configs, scale, sliding_window, softcap, sinks, position_bias)


def plan_passes(
    query: Tensor,
    layer_cache: Tensor,
    batch: AttentionBatch,
    sliding_window: int | None,
    position_bias: Tensor | None = None,
) -> list[AttentionPass]:
    """The passes of a step: one, or one over shared prefixes and one over the tails."""
    num_tokens, num_heads, head_size = query.shape
    num_kv_heads = layer_cache.shape[3]

    def shape(num_runs: int, max_query_len: int, max_kv_len: int) -> LaunchShape:
        return LaunchShape(
            num_runs=num_runs,
            num_tokens=num_tokens,
            max_query_len=max_query_len,
            max_kv_len=max_kv_len,
            num_kv_heads=num_kv_heads,
            queries_per_kv=num_heads // num_kv_heads,
            head_size=head_size,
            itemsize=query.element_size(),
            has_bias=position_bias is not None,
        )

    shared = batch.prefixes_for(sliding_window, position_bias)
    if shared is not None:
        prefix = AttentionPass(
            query_start_loc=shared.query_start_loc,
            block_tables=shared.block_tables,
            kv_begin=None,
            kv_end=shared.prefix_lens,
            is_prefix=True,
            causal=False,
            shape=shape(len(shared.prefix_lens), shared.max_query_len, shared.max_prefix_len),
        )
        kv_begin, max_kv_len = shared.seq_prefix_lens, shared.max_tail_len
    else:
        prefix, kv_begin, max_kv_len = None, None, batch.max_seq_len
    if sliding_window is not None:
        max_kv_len = min(max_kv_len, sliding_window + 128)  # a tile holds up to 128 tokens, each with its own window
    own = AttentionPass(
        query_start_loc=batch.query_start_loc,
        block_tables=batch.block_tables,
        kv_begin=kv_begin,
        kv_end=batch.seq_lens,
        is_prefix=False,
        causal=batch.causal,
        shape=shape(len(batch.seq_lens), batch.max_query_len, max_kv_len),
    )
    return [own] if prefix is None else [prefix, own]


def attend(
    query: Tensor,
    layer_cache: Tensor,
    passes: list[AttentionPass],
    configs: list[LaunchConfig],
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    position_bias: Tensor | None = None,
) -> Tensor:
    """Launches the passes with the given configs, and the merge if there are several parts."""
    num_tokens, num_heads, head_size = query.shape
    output = torch.empty((num_tokens, num_heads, head_size), dtype=query.dtype, device=query.device)
    num_parts = sum(config.num_splits for config in configs)
    if num_parts == 1:
        one, config = passes[0], configs[0]
        _launch(output, None, query, layer_cache, one, config, scale, sliding_window, softcap, sinks, position_bias)
        return output

    partial = torch.empty((num_parts, num_tokens, num_heads, head_size), dtype=torch.float32, device=query.device)
    lse = torch.empty((num_parts, num_tokens, num_heads), dtype=torch.float32, device=query.device)
    ends = accumulate((config.num_splits for config in configs), initial=0)
    for one, config, (begin, end) in zip(passes, configs, pairwise(ends), strict=True):
        # Sinks and window apply to a sequence's own keys; every token sees the whole shared prefix.
        window, own_sinks = (None, None) if one.is_prefix else (sliding_window, sinks)
        to, lse_to = partial[begin:end], lse[begin:end]
        _launch(to, lse_to, query, layer_cache, one, config, scale, window, softcap, own_sinks, position_bias)
    merge_kernel[(num_tokens, num_heads)](
        output,
        partial,
        lse,
        num_tokens,
        num_parts,
        output.stride(0),
        output.stride(1),
        NUM_HEADS=num_heads,
        HEAD_SIZE=head_size,
        HEAD_PADDED=next_power_of_two(head_size),
        PARTS_PADDED=next_power_of_two(num_parts),
        BLOCK_PARTS=min(16, next_power_of_two(num_parts)),
        num_warps=4,
    )
    return output


def _launch(
    output: Tensor,
    lse: Tensor | None,
    query: Tensor,
    layer_cache: Tensor,
    one: AttentionPass,
    config: LaunchConfig,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    position_bias: Tensor | None,
) -> None:
    """One launch of `attention_kernel`; `output` and `lse` as its pointers of those names."""
    key_cache, value_cache = layer_cache
    shape = one.shape
    while True:
        tile = config.tile
        grid = (num_tiles(shape, tile.block_m) * shape.num_kv_heads, config.num_splits)
        try:
            attention_kernel[grid](
                output,
                lse,
                query,
                key_cache,
                value_cache,
                sinks,
                position_bias,
                one.block_tables,
                one.kv_begin,
                one.kv_end,
                one.query_start_loc,
                shape.num_runs,
                shape.num_tokens,
                config.split_len,
                window,
                softcap,
                None if position_bias is None else (position_bias.shape[1] + 1) // 2,
                scale,
                output.stride(-3),
                output.stride(-2),
                query.stride(0),
                query.stride(1),
                key_cache.stride(0),
                key_cache.stride(1),
                key_cache.stride(2),
                one.block_tables.stride(0),
                NUM_KV_HEADS=shape.num_kv_heads,
                QUERIES_PER_KV=shape.queries_per_kv,
                HEAD_SIZE=shape.head_size,
                HEAD_PADDED=shape.head_padded,
                BLOCK_SIZE=key_cache.shape[1],
                BLOCK_M=tile.block_m,
                BLOCK_N=tile.block_n,
                ONE_TILE_PER_RUN=one_tile_per_run(shape, tile.block_m),
                CAUSAL=one.causal,
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
                **_COMPILE_OPTIONS,
            )
        except OutOfResources:
            # The estimate was wrong for this device or compiler: use a smaller config rather than fail.
            smaller = config.shrunk()
            if smaller is None:
                raise
            config = smaller
        else:
            return


def check_arguments(query: Tensor, layer_cache: Tensor, batch: AttentionBatch, sinks: Tensor | None) -> None:
    """Rejects tensors that the kernels would misread; shapes as in `interface.Backend.paged_attention`."""
    if query.ndim != 3 or layer_cache.ndim != 5 or layer_cache.shape[0] != 2:
        raise ValueError(f"query {tuple(query.shape)} or cache {tuple(layer_cache.shape)} has the wrong dimensions")
    _, num_heads, head_size = query.shape
    num_kv_heads, cache_head_size = layer_cache.shape[3:]
    if head_size != cache_head_size or num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads of size {head_size} on {num_kv_heads} KV heads of {cache_head_size}")
    if head_size > MAX_HEAD_SIZE:
        raise ValueError(f"head size {head_size} is above {MAX_HEAD_SIZE}")
    if query.dtype != layer_cache.dtype:
        raise ValueError(f"query is {query.dtype}, the cache {layer_cache.dtype}")
    if query.stride(-1) != 1 or layer_cache.stride(-1) != 1:
        raise ValueError("query and cache must be contiguous in the head dimension")
    for name, tensor in (
        ("block_tables", batch.block_tables),
        ("seq_lens", batch.seq_lens),
        ("query_start_loc", batch.query_start_loc),
    ):
        if tensor.dtype != torch.int32 or tensor.stride(-1) != 1:
            raise ValueError(f"{name} must be int32 and contiguous")
    if len(batch.query_start_loc) != len(batch.seq_lens) + 1 or len(batch.block_tables) != len(batch.seq_lens):
        raise ValueError("block_tables, seq_lens and query_start_loc disagree about the number of sequences")
    if sinks is not None and (sinks.shape != (num_heads,) or sinks.stride(0) != 1):
        raise ValueError(f"sinks must be contiguous [{num_heads}], not {tuple(sinks.shape)}")

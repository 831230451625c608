"""The attention kernels in Triton: one ragged pass over paged K/V, and the merge of partial results.

`triton_attention` checks the tensors, chooses the tiles and launches them.

The pass follows FlashAttention-2 (Dao, 2023): a tile of query rows stays in place while K/V tiles stream by, with an
online softmax in base 2. A row is one query head of one token; the rows of a run that read the same KV head are packed
without gaps, so that a decode token of a grouped-query model fills as much of a tile as it can. K/V tiles are cut by
token, not by block: each token's block id is looked up, so that any block size works with any tile size.

With `lse_ptr`, a pass covers a part of the keys (a split of a long context, or a shared prefix) and stores its
normalised result with the log-sum-exp of its scores; `merge_kernel` combines the parts. This is the split of
Flash-Decoding (Dao et al., 2023) and the merge of cascade inference (Ye et al., 2024).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
NEG_INF = tl.constexpr(float("-inf"))
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _run_of_tile(query_start_loc_ptr, num_runs, tile, QUERIES_PER_KV: tl.constexpr, BLOCK_M: tl.constexpr):
    """The run that a tile belongs to, and the run's first tile.

    Run i starts at tile `query_start_loc[i] * QUERIES_PER_KV // BLOCK_M + i`: an upper bound that needs no prefix sum
    of its own and leaves at most one idle tile per run.
    """
    low = tl.full([], 0, tl.int32)
    high = num_runs
    while high - low > 1:
        middle = (low + high) // 2
        first_tile = tl.load(query_start_loc_ptr + middle) * QUERIES_PER_KV // BLOCK_M + middle
        low = tl.where(first_tile <= tile, middle, low)
        high = tl.where(first_tile <= tile, high, middle)
    return low, tl.load(query_start_loc_ptr + low) * QUERIES_PER_KV // BLOCK_M + low


@triton.jit
def _tanh(x):
    # The exponent is never positive, so nothing overflows and large x saturates to +-1.
    decayed = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E))
    size = (1.0 - decayed) / (1.0 + decayed)
    return tl.where(x < 0.0, -size, size)


@triton.jit
def _bias_of_tile(table_ptr, reach, distance):
    """What is added to each score, for the query's minus the key's position; `table_ptr` to each row's head."""
    return tl.load(table_ptr + tl.minimum(tl.maximum(reach - 1 - distance, 0), 2 * reach - 2))


@triton.jit
def _dot(a, b, acc):
    # Triton's interpreter multiplies the bits of bfloat16 as integers.
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    # "ieee": float32 stays float32 where the hardware would offer tf32; no other type is affected.
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit(do_not_specialize=["num_runs", "num_tokens", "split_len", "bias_reach", "stride_table"])
def attention_kernel(
    output_ptr,  # [num_tokens, num_heads, HEAD_SIZE], or float32 [num_splits, num_tokens, num_heads, HEAD_SIZE]
    lse_ptr,  # float32 [num_splits, num_tokens, num_heads] in base 2, or None: the pass covers every key
    query_ptr,  # [num_tokens, num_heads, HEAD_SIZE]
    key_ptr,  # [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_SIZE]
    value_ptr,  # like key_ptr, same strides
    sinks_ptr,  # [num_heads], or None
    bias_ptr,  # float32 [num_heads, 2 * bias_reach - 1], see `interface.Backend.paged_attention`; or None
    block_tables_ptr,  # int32 [num_runs, max_blocks]
    kv_begin_ptr,  # int32 [num_runs], keys before it belong to another pass; or None
    kv_end_ptr,  # int32 [num_runs], the run's keys end here
    query_start_loc_ptr,  # int32 [num_runs + 1]
    num_runs,
    num_tokens,
    split_len,
    window,  # tokens that a token sees, itself included, or None; only if CAUSAL
    softcap,  # or None
    bias_reach,  # or None
    scale,
    stride_output_token,
    stride_output_head,
    stride_query_token,
    stride_query_head,
    stride_block,
    stride_slot,
    stride_kv_head,
    stride_table,
    NUM_KV_HEADS: tl.constexpr,
    QUERIES_PER_KV: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,  # next power of two
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ONE_TILE_PER_RUN: tl.constexpr,
    CAUSAL: tl.constexpr,  # a query sees the keys up to itself; else all
):
    """Grid: (num_tiles * NUM_KV_HEADS, num_splits)."""
    # KV heads vary fastest: the programs that run side by side read neighbouring bytes of the same slots.
    tile = tl.program_id(0) // NUM_KV_HEADS
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    split = tl.program_id(1)

    if ONE_TILE_PER_RUN:
        run = tile
        first_tile = tile
    else:
        run, first_tile = _run_of_tile(query_start_loc_ptr, num_runs, tile, QUERIES_PER_KV, BLOCK_M)
    query_start = tl.load(query_start_loc_ptr + run)
    query_len = tl.load(query_start_loc_ptr + run + 1) - query_start
    first_row = (tile - first_tile) * BLOCK_M
    num_rows = query_len * QUERIES_PER_KV
    if first_row >= num_rows:
        return

    row = first_row + tl.arange(0, BLOCK_M)
    row_ok = row < num_rows
    token = row // QUERIES_PER_KV
    head = kv_head * QUERIES_PER_KV + row % QUERIES_PER_KV
    dim = tl.arange(0, HEAD_PADDED)
    dim_ok = dim < HEAD_SIZE

    # The keys that are visible to some row of this tile, then this split's share of them.
    kv_end = tl.load(kv_end_ptr + run)
    context_len = kv_end - query_len
    position = context_len + token
    kv_begin = 0
    if kv_begin_ptr is not None:
        kv_begin = tl.load(kv_begin_ptr + run)
    if CAUSAL:
        last_row = tl.minimum(first_row + BLOCK_M, num_rows) - 1
        kv_end = context_len + last_row // QUERIES_PER_KV + 1
        if window is not None:
            kv_begin = tl.maximum(kv_begin, context_len + first_row // QUERIES_PER_KV + 1 - window)
    if lse_ptr is not None:
        kv_begin += split * split_len
        kv_end = tl.minimum(kv_end, kv_begin + split_len)

    out_row = split.to(tl.int64) * num_tokens + query_start + token
    if lse_ptr is not None:
        lse_ptrs = lse_ptr + out_row * (NUM_KV_HEADS * QUERIES_PER_KV) + head
        if kv_begin >= kv_end:
            tl.store(lse_ptrs, tl.full([BLOCK_M], NEG_INF, tl.float32), mask=row_ok)
            return

    query = tl.load(
        query_ptr
        + (query_start + token)[:, None].to(tl.int64) * stride_query_token
        + head[:, None].to(tl.int64) * stride_query_head
        + dim,
        mask=row_ok[:, None] & dim_ok,
        other=0.0,
    )
    row_max = tl.full([BLOCK_M], NEG_INF, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if sinks_ptr is not None:  # noqa: SIM102 (decided by the compiler, the inner test by the program)
        # A sink is a first key whose value is 0; counted once, by the first split.
        if split == 0:
            row_max = tl.load(sinks_ptr + head, mask=row_ok, other=0.0).to(tl.float32) * LOG2_E
            row_sum += 1.0
    acc = tl.zeros([BLOCK_M, HEAD_PADDED], tl.float32)

    table_ptr = block_tables_ptr + run.to(tl.int64) * stride_table
    key_ptr += kv_head * stride_kv_head
    value_ptr += kv_head * stride_kv_head
    if bias_ptr is not None:
        # Loaded one tile ahead: Triton would keep as many tiles of a load within the loop as of K in shared memory.
        bias_ptr += head[:, None] * (2 * bias_reach - 1)
        bias = _bias_of_tile(bias_ptr, bias_reach, position[:, None] - (kv_begin + tl.arange(0, BLOCK_N))[None, :])
    for start in range(kv_begin, kv_end, BLOCK_N):
        position_kv = start + tl.arange(0, BLOCK_N)
        # Slots past the end may hold NaN: they must not be read, as 0 * NaN would be NaN.
        kv_ok = position_kv < kv_end
        block = tl.load(table_ptr + position_kv // BLOCK_SIZE, mask=kv_ok, other=0).to(tl.int64)
        offset = (block * stride_block + (position_kv % BLOCK_SIZE) * stride_slot)[:, None] + dim
        load_ok = kv_ok[:, None] & dim_ok

        key = tl.load(key_ptr + offset, mask=load_ok, other=0.0)
        scores = _dot(query, tl.trans(key), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
        distance = position[:, None] - position_kv[None, :]
        score_scale = scale
        if bias_ptr is not None:
            scores = scores * scale + bias
            bias = _bias_of_tile(bias_ptr, bias_reach, distance - BLOCK_N)
            score_scale = 1.0
        if softcap is not None:
            scores = _tanh(scores * (score_scale / softcap)) * (softcap * LOG2_E)
        else:
            scores *= score_scale * LOG2_E
        visible = kv_ok[None, :]
        if CAUSAL:
            visible &= distance >= 0
            if window is not None:
                visible &= distance < window
        scores = tl.where(visible, scores, NEG_INF)

        new_max = tl.maximum(row_max, tl.max(scores, 1))
        # row_max is -inf while a row has no visible key, and -inf - -inf would be NaN.
        safe_max = tl.where(new_max == NEG_INF, 0.0, new_max)
        weights = tl.exp2(scores - safe_max[:, None])
        decay = tl.exp2(row_max - safe_max)
        row_sum = row_sum * decay + tl.sum(weights, 1)
        value = tl.load(value_ptr + offset, mask=load_ok, other=0.0)
        acc = _dot(weights.to(value.dtype), value, acc * decay[:, None])
        row_max = new_max

    # Without a visible key in this part, row_sum is 0: the result is 0 and the log-sum-exp -inf.
    safe_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    result = acc / safe_sum[:, None]
    tl.store(
        output_ptr + out_row[:, None] * stride_output_token + head[:, None] * stride_output_head + dim,
        result.to(output_ptr.dtype.element_ty),
        mask=row_ok[:, None] & dim_ok,
    )
    if lse_ptr is not None:
        tl.store(lse_ptrs, row_max + tl.log2(safe_sum), mask=row_ok)


@triton.jit(do_not_specialize=["num_tokens", "num_parts"])
def merge_kernel(
    output_ptr,  # [num_tokens, num_heads, HEAD_SIZE]
    partial_ptr,  # float32 [num_parts, num_tokens, num_heads, HEAD_SIZE], contiguous
    lse_ptr,  # float32 [num_parts, num_tokens, num_heads] in base 2, contiguous
    num_tokens,
    num_parts,
    stride_output_token,
    stride_output_head,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    PARTS_PADDED: tl.constexpr,  # a power of two >= num_parts
    BLOCK_PARTS: tl.constexpr,
):
    """Combines the parts of each row, weighted by their log-sum-exp. Grid: (num_tokens, NUM_HEADS)."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    row = token * NUM_HEADS + head
    num_rows = num_tokens.to(tl.int64) * NUM_HEADS
    dim = tl.arange(0, HEAD_PADDED)

    every_part = tl.arange(0, PARTS_PADDED)
    lse = tl.load(lse_ptr + every_part * num_rows + row, mask=every_part < num_parts, other=NEG_INF)
    row_max = tl.max(lse, 0)
    row_sum = tl.sum(tl.exp2(lse - row_max), 0)

    acc = tl.zeros([HEAD_PADDED], tl.float32)
    for first in range(0, num_parts, BLOCK_PARTS):
        part = first + tl.arange(0, BLOCK_PARTS)
        part_row = part * num_rows + row
        part_lse = tl.load(lse_ptr + part_row, mask=part < num_parts, other=NEG_INF)
        # An empty part wrote no result, only its -inf.
        filled = part_lse > NEG_INF
        result = tl.load(
            partial_ptr + part_row[:, None] * HEAD_SIZE + dim,
            mask=filled[:, None] & (dim < HEAD_SIZE),
            other=0.0,
        )
        acc += tl.sum(result * tl.exp2(part_lse - row_max)[:, None], 0)
    tl.store(
        output_ptr + token.to(tl.int64) * stride_output_token + head * stride_output_head + dim,
        (acc / row_sum).to(output_ptr.dtype.element_ty),
        mask=dim < HEAD_SIZE,
    )

"""The torch backend: the oracle of the tests and the fallback of the other backends.

Cache layout: [num_layers, 2, num_blocks, block_size, num_kv_heads, head_size], K before V.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagedbatch_kernels.interface import AttentionBatch, AttentionShape, CacheShape


def allocate_cache(
    shape: CacheShape, num_blocks: int, dtype: torch.dtype, device: torch.device, *, is_spare: bool = False
) -> Tensor:
    """See `interface.Backend.allocate_cache`."""
    size = (shape.num_layers, 2, num_blocks, shape.block_size, shape.num_kv_heads, shape.head_size)
    pin = device.type == "cpu" and torch.cuda.is_available()
    return torch.empty(size, dtype=dtype, device=device, pin_memory=pin)


def prefix_costs(attention: AttentionShape, device: torch.device) -> None:
    """See `interface.Backend.prefix_costs`: this backend never shares."""


def write_kv(key: Tensor, value: Tensor, layer_cache: Tensor, slot_mapping: Tensor) -> None:
    """See `interface.Backend.write_kv`."""
    is_finite = torch.isfinite(value).all(dim=-1, keepdim=True)
    key, value = torch.where(is_finite, key, torch.nan), torch.where(is_finite, value, 0.0)
    key_slots, value_slots = layer_cache.flatten(1, 2)
    key_slots.index_copy_(0, slot_mapping, key)
    value_slots.index_copy_(0, slot_mapping, value)


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
    """See `interface.Backend.paged_attention`.

    One sequence at a time, so that a sequence's result never depends on its batch.
    """
    batch.check_mask(query.shape[1], sliding_window, position_bias)
    output = torch.empty_like(query)
    starts = batch.query_start_loc.tolist()
    for i, seq_len in enumerate(batch.seq_lens.tolist()):
        if starts[i] == starts[i + 1]:
            continue
        rows = slice(starts[i], starts[i + 1])
        # Blocks before the window of the first query may have been freed: nothing in them is read.
        first_query = seq_len - (starts[i + 1] - starts[i])
        begin = 0 if sliding_window is None else max(0, first_query - sliding_window + 1)
        key, value = _gather(layer_cache, batch.block_tables[i], begin, seq_len)
        output[rows] = _attend(
            query[rows],
            key,
            value,
            scale=scale,
            causal=batch.causal,
            sliding_window=sliding_window,
            softcap=softcap,
            sinks=sinks,
            position_bias=position_bias,
        )
    return output


def copy_blocks(cache: Tensor, src: Tensor, dst: Tensor) -> None:
    """See `interface.Backend.copy_blocks`."""
    cache[:, :, dst] = cache[:, :, src]


def swap_blocks(src_cache: Tensor, dst_cache: Tensor, src: Tensor, dst: Tensor) -> None:
    """See `interface.Backend.swap_blocks`."""
    blocks = src_cache[:, :, src.to(src_cache.device)]
    dst_cache[:, :, dst.to(dst_cache.device)] = blocks.to(dst_cache.device)


def _gather(layer_cache: Tensor, block_table: Tensor, begin: int, end: int) -> tuple[Tensor, Tensor]:
    """K and V of a sequence's tokens [begin, end), each [num_kv_heads, end - begin, head_size] in float32."""
    block_size = layer_cache.shape[2]
    first_block = begin // block_size
    blocks = block_table[first_block : -(-end // block_size)]
    offset = first_block * block_size
    kv = layer_cache[:, blocks].flatten(1, 2)[:, begin - offset : end - offset].float()
    key, value = kv.transpose(1, 2)
    return key, value


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    causal: bool,
    sliding_window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    position_bias: Tensor | None,
) -> Tensor:
    """Attention of a sequence's query tokens [query_len, num_heads, head_size] over K and V that end with them."""
    query_len, num_heads, head_size = query.shape
    num_kv_heads, num_keys, _ = key.shape
    queries_per_kv = num_heads // num_kv_heads

    def distances() -> Tensor:
        """[query_len, num_keys], query position minus key position."""
        position = torch.arange(num_keys - query_len, num_keys, device=query.device)[:, None]
        return position - torch.arange(num_keys, device=query.device)

    # Query heads of one KV head become rows of one matrix product: [num_kv_heads, query_len * queries_per_kv,
    # head_size].
    grouped = query.float().view(query_len, num_kv_heads, queries_per_kv, head_size).transpose(0, 1)
    scores = torch.matmul(grouped.reshape(num_kv_heads, -1, head_size) * scale, key.transpose(1, 2))
    scores = scores.view(num_kv_heads, query_len, queries_per_kv, num_keys)
    if position_bias is not None:
        reach = (position_bias.shape[1] + 1) // 2
        entry = (reach - 1 - distances()).clamp(0, 2 * reach - 2)
        scores += position_bias.view(num_kv_heads, queries_per_kv, -1)[:, :, entry].transpose(1, 2)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if causal and (query_len > 1 or sliding_window is not None):
        distance = distances()
        hidden = distance < 0
        if sliding_window is not None:
            hidden |= distance >= sliding_window
        scores = scores.masked_fill(hidden[:, None, :], float("-inf"))
    if sinks is not None:
        sink = sinks.float().view(num_kv_heads, 1, queries_per_kv, 1).expand(-1, query_len, -1, 1)
        weights = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    attended = torch.matmul(weights.reshape(num_kv_heads, -1, num_keys), value)
    attended = attended.view(num_kv_heads, query_len, queries_per_kv, head_size).transpose(0, 1)
    return attended.reshape(query_len, num_heads, head_size).to(query.dtype)

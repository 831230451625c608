"""Hugging Face's attention call, answered from the paged pool. The only place that knows both sides' shapes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from pagedbatch_kernels.interface import AttentionBatch, Backend
from torch import Tensor, nn
from transformers import AttentionInterface

ATTENTION_NAME = "pagedbatch"


@dataclass(slots=True)
class PagedAttentionContext:
    """One step's batch, handed to `forward` as `paged=` and from there to every attention layer.

    `seconds` sums the time spent in attention, K/V writes included.
    """

    backend: Backend
    cache: Tensor
    batch: AttentionBatch
    seconds: float = 0.0


def register_attention() -> None:
    """Makes `attn_implementation="pagedbatch"` known to transformers."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)


def paged_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    *,
    paged: PagedAttentionContext,
    **_: Any,
) -> tuple[Tensor, None]:
    """Writes the step's K/V into the pool, then attends over the block tables.

    Args:
        module: the attention layer; `layer_idx` says which part of the cache is its own.
        query: [1, num_heads, num_tokens, head_size], rotated already.
        key, value: [1, num_kv_heads, num_tokens, head_size].
        attention_mask: None, as the block tables say who sees what.
        scaling, sliding_window, softcap, s_aux: as the model passes them; see `Backend.paged_attention`.

    Returns:
        [1, num_tokens, num_heads, head_size], and no weights.
    """
    began = time.perf_counter()
    layer_idx = module.layer_idx
    assert isinstance(layer_idx, int)
    layer_cache = paged.cache[layer_idx]
    paged.backend.write_kv(key[0].transpose(0, 1), value[0].transpose(0, 1), layer_cache, paged.batch.slot_mapping)
    output = paged.backend.paged_attention(
        query[0].transpose(0, 1),
        layer_cache,
        paged.batch,
        scale=scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    paged.seconds += time.perf_counter() - began
    return output.unsqueeze(0), None

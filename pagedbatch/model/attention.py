"""Hugging Face's attention call, answered from the paged pool. The only place that knows both sides' shapes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pagedbatch_kernels.interface import AttentionBatch, Backend
from torch import Tensor, nn
from transformers import AttentionInterface

ATTENTION_NAME = "pagedbatch"


@dataclass(slots=True)
class PagedAttention:
    """What the attention layers of one model share: the backend, the cache, and the batch of the step.

    Bound to the layers themselves, not passed through `forward`: some families (StableLM, Nemotron) don't hand extra
    arguments on to their attention. `seconds` sums the time spent here, `calls` counts layers; both since the last
    `begin_step`.
    """

    backend: Backend
    cache: Tensor
    batch: AttentionBatch | None = None
    seconds: float = 0.0
    calls: int = 0

    def bind(self, model: nn.Module) -> None:
        """Makes this the state that every layer of `model` attends with."""
        for module in model.modules():
            if hasattr(module, "layer_idx"):
                module.paged_attention = self  # type: ignore[assignment]

    def begin_step(self, batch: AttentionBatch) -> None:
        self.batch, self.seconds, self.calls = batch, 0.0, 0

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Adds what runs inside to `seconds`."""
        began = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - began


def register_attention() -> None:
    """Makes `attn_implementation="pagedbatch"` known to transformers."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)


def paged_attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Writes the step's K/V into the pool, then attends over the block tables.

    Args:
        module: the attention layer, bound to a `PagedAttention`; `layer_idx` says which part of the cache is its own.
        query: [1, num_heads, num_tokens, head_size], rotated already.
        key, value: [1, num_kv_heads, num_tokens, head_size].
        attention_mask: None, as the block tables say who sees what.
        scaling, sliding_window, softcap, s_aux: as the model passes them; see `Backend.paged_attention`.

    Returns:
        [1, num_tokens, num_heads, head_size], and no weights.
    """
    paged: PagedAttention = module.paged_attention
    assert paged.batch is not None
    layer_cache = paged.cache[module.layer_idx]
    with paged.timed():
        paged.backend.write_kv(key[0].transpose(0, 1), value[0].transpose(0, 1), layer_cache, paged.batch.slot_mapping)
        output = paged.backend.paged_attention(
            query[0].transpose(0, 1),
            layer_cache,
            paged.batch,
            scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            sliding_window=sliding_window,
            softcap=softcap,
            sinks=s_aux,
        )
    paged.calls += 1
    return output.unsqueeze(0), None

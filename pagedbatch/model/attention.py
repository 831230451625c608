"""Hugging Face's attention interface on top of a paged KV cache: translates between the shapes of the two."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pagedbatch_kernels.interface import AttentionBatch, Backend
from torch import Tensor, nn
from transformers import AttentionInterface

from pagedbatch.errors import RunError

ATTENTION_NAME = "pagedbatch"


@dataclass(slots=True)
class PagedAttention:
    """What the self-attention layers of a decoder share: the backend, the cache, and the batch of the step.

    It is an attribute of the layers, not an argument of `forward`: some families (StableLM, Nemotron) don't pass extra
    arguments on to their attention. `seconds` sums the time spent in attention, `calls` counts layers; both since the
    last `begin_step`. `position_bias` is added to the scores of every layer, or of each its own: see `Backend`.
    """

    backend: Backend
    cache: Tensor
    batch: AttentionBatch | None = None
    seconds: float = 0.0
    calls: int = 0
    position_bias: Sequence[Tensor] | None = None  #: of each layer, float32 [num_heads, 2 * reach - 1]

    def bind(self, model: nn.Module) -> None:
        """Makes every layer of `model` use this."""
        for module in model.modules():
            if hasattr(module, "layer_idx"):
                module.paged_attention = self  # type: ignore[assignment]

    def begin_step(self, batch: AttentionBatch) -> None:
        self.batch, self.seconds, self.calls = batch, 0.0, 0

    def check_calls(self, expected: int, model_type: str) -> None:
        """
        Raises:
            RunError: a layer computed its attention without the KV pool.
        """
        if self.calls != expected:
            raise RunError(
                f"{self.calls} of {expected} layers attended through the KV pool: model type {model_type!r} does not "
                "route its attention through it"
            )

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Writes the step's K/V into a layer's cache, then attends over the block tables.

        Args:
            query: [num_tokens, num_heads, head_size], after RoPE.
            key, value: [num_tokens, num_kv_heads, head_size].
            options: keyword arguments of `Backend.paged_attention`.
        """
        assert self.batch is not None
        if self.position_bias is not None:
            options["position_bias"] = self.position_bias[layer]
        with self.timed():
            self.backend.write_kv(key, value, self.cache[layer], self.batch.slot_mapping)
            output = self.backend.paged_attention(query, self.cache[layer], self.batch, **options)
        self.calls += 1
        return output

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Adds the time spent inside to `seconds`."""
        began = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - began


def register_attention() -> None:
    """Registers `attn_implementation="pagedbatch"` with transformers."""
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
    """Attention over the paged cache.

    Args:
        module: the attention layer, bound to a `PagedAttention` or to what stands for it in an encoder-decoder;
            `layer_idx` is its index in the cache.
        query: [1, num_heads, num_tokens, head_size], after RoPE.
        key, value: [1, num_kv_heads, num_tokens, head_size].
        attention_mask: None: masks follow from the block tables.
        scaling, sliding_window, softcap, s_aux: as the model passes them; see `Backend.paged_attention`.

    Returns:
        [1, num_tokens, num_heads, head_size], and None in place of attention weights.
    """
    output: Tensor = module.paged_attention.attend(
        module.layer_idx,
        *(each[0].transpose(0, 1) for each in (query, key, value)),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return output.unsqueeze(0), None

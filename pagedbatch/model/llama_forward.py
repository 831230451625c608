"""A fused forward for decoders built like Llama, on a CPU.

The arithmetic of transformers in fewer passes: packed weights, one GEMM for queries, keys and values, SwiGLU and
residual additions inside the GEMMs, one pass each for RMS norm and for head norm, RoPE and the write of K/V
(norm_rope.cpp), and in the last layer only the tokens whose logits are needed. A family that is not listed, or a model
that differs from its family in any part, keeps the forward of transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from pagedbatch_kernels.cpu.norm_rope import NormRope
from pagedbatch_kernels.interface import AttentionBatch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from pagedbatch.model.attention import PagedAttention
from pagedbatch.model.fused_checks import holds_weights, is_untouched
from pagedbatch.model.input_batch import InputBatch
from pagedbatch.model.model_config import sliding_windows
from pagedbatch.model.packed_linear import Linear, Linears, ResidualLinear

#: Model types whose decoder layer is Llama's, with or without biases, head norms, windows and layers without positions.
#: `tests/test_families.py` compares each with Hugging Face's own forward.
FUSED_MODEL_TYPES = frozenset({"cwm", "llama", "ministral", "mistral", "qwen2", "qwen3", "seed_oss", "smollm3"})


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm."""

    weight: Tensor  #: [size]
    epsilon: float

    @classmethod
    def of(cls, module: Any) -> Norm:
        return cls(module.weight.detach(), module.variance_epsilon)


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer, ready to run."""

    input_norm: Norm
    qkv: Linear
    query_norm: Tensor | None  #: [head_size], a norm's weight
    key_norm: Tensor | None
    head_norm_epsilon: float
    rotates: bool
    scale: float
    sliding_window: int | None
    output: ResidualLinear
    mlp_norm: Norm
    gate_up: Linear
    down: ResidualLinear

    @classmethod
    def of(cls, module: Any, sliding_window: int | None, linears: Linears, *, keep: bool) -> Layer:
        attention, mlp = module.self_attn, module.mlp
        has_norms = hasattr(attention, "q_norm")
        return cls(
            input_norm=Norm.of(module.input_layernorm),
            qkv=linears.linear(attention.q_proj, attention.k_proj, attention.v_proj, keep=keep),
            query_norm=attention.q_norm.weight.detach() if has_norms else None,
            key_norm=attention.k_norm.weight.detach() if has_norms else None,
            head_norm_epsilon=attention.q_norm.variance_epsilon if has_norms else 0.0,
            rotates=bool(getattr(attention, "use_rope", True)),
            scale=attention.scaling,
            sliding_window=sliding_window,
            output=linears.linear(attention.o_proj, keep=keep),
            mlp_norm=Norm.of(module.post_attention_layernorm),
            gate_up=linears.gated(mlp.gate_proj, mlp.up_proj, "silu", keep=keep),
            down=linears.linear(mlp.down_proj, keep=keep),
        )


class FusedForward:
    """Runs the model's layers in place of its own `forward`.

    Args:
        model: one for which `can_run_fused` is true.
        keep_model: the model keeps its weights, at the price of a second copy; else it can't be called afterwards.
    """

    def __init__(
        self, model: Any, attention: PagedAttention, ops: NormRope, linears: Linears, *, keep_model: bool
    ) -> None:
        self._attention = attention
        self._ops = ops
        self._num_heads: int = model.config.num_attention_heads
        self._head_size: int = model.model.layers[0].self_attn.head_dim
        self._embeddings: Tensor = model.model.embed_tokens.weight.detach()
        self._rotary: Callable[..., tuple[Tensor, Tensor]] = model.model.rotary_emb
        self._layers = [
            Layer.of(layer, window, linears, keep=keep_model)
            for layer, window in zip(model.model.layers, sliding_windows(model.config), strict=True)
        ]
        self._norm = Norm.of(model.model.norm)
        is_tied = model.lm_head.weight is model.model.embed_tokens.weight  # and the embeddings are looked up
        self._head = linears.linear(model.lm_head, keep=keep_model or is_tied)
        self._vocab_size: int = model.lm_head.out_features

    def __call__(self, batch: InputBatch) -> Tensor:
        """Logits [num_logits, vocab_size] of the positions that need them."""
        hidden = self._embeddings[batch.input_ids[0]]
        cosine, sine = self._rotary(hidden.unsqueeze(0), batch.position_ids)
        rotation = cosine[0], sine[0]
        for number, layer in enumerate(self._layers[:-1]):
            queries = self._queries(number, layer, hidden, rotation, batch)
            hidden = self._finish(number, layer, hidden, queries, batch.attention)

        number, layer = len(self._layers) - 1, self._layers[-1]
        queries = self._queries(number, layer, hidden, rotation, batch)
        if len(batch.logits_indices) == 0:  # this step only writes K/V
            return hidden.new_empty(0, self._vocab_size)
        if batch.last_attention is None:
            hidden = self._finish(number, layer, hidden, queries, batch.attention)[batch.logits_indices]
        else:
            wanted = batch.logits_indices
            hidden = self._finish(number, layer, hidden[wanted], queries[wanted], batch.last_attention)
        return self._head(self._normed(hidden, self._norm))

    def _queries(
        self, number: int, layer: Layer, hidden: Tensor, rotation: tuple[Tensor, Tensor], batch: InputBatch
    ) -> Tensor:
        """Rotated queries [num_tokens, num_heads, head_size]; keys and values go into the cache."""
        qkv = layer.qkv(self._normed(hidden, layer.input_norm)).view(len(hidden), -1, self._head_size)
        with self._attention.timed():
            self._ops.rope_and_write_kv(
                qkv,
                self._attention.cache[number],
                batch.attention.slot_mapping,
                rotation if layer.rotates else None,
                q_norm=layer.query_norm,
                k_norm=layer.key_norm,
                epsilon=layer.head_norm_epsilon,
            )
        return qkv[:, : self._num_heads]

    def _finish(self, number: int, layer: Layer, hidden: Tensor, queries: Tensor, attention: AttentionBatch) -> Tensor:
        """The rest of the layer for the tokens of `queries`; `hidden` and the result are [num_queries, hidden_size]."""
        with self._attention.timed():
            attended = self._attention.backend.paged_attention(
                queries,
                self._attention.cache[number],
                attention,
                scale=layer.scale,
                sliding_window=layer.sliding_window,
            )
        hidden = layer.output(attended.view(len(hidden), -1), hidden)
        return layer.down(layer.gate_up(self._normed(hidden, layer.mlp_norm)), hidden)

    def _normed(self, hidden: Tensor, norm: Norm) -> Tensor:
        return self._ops.rms_norm(hidden, norm.weight, norm.epsilon)


def can_run_fused(model: Any) -> bool:
    """Whether `FusedForward` computes the same as the model's own forward."""
    config = model.config
    if config.model_type not in FUSED_MODEL_TYPES:
        return False
    if model.device.type != "cpu" or model.dtype not in (torch.float32, torch.bfloat16):
        return False
    if not all(is_untouched(module) for module in model.modules()):
        return False
    linears = [model.lm_head, *(linear for layer in model.model.layers for linear in _linears(layer))]
    if not all(holds_weights(linear, nn.Linear, model.dtype) for linear in linears):
        return False
    rotated = model.model.rotary_emb.inv_freq.numel() * 2  # partial rotation leaves some elements alone
    return holds_weights(model.model.embed_tokens, nn.Embedding, model.dtype) and all(
        layer.self_attn.head_dim == rotated
        and type(layer.mlp.act_fn) in (nn.SiLU, SiLUActivation)
        and all(linear.in_features % 2 == 0 for linear in _linears(layer))
        for layer in model.model.layers
    )


def _linears(layer: Any) -> list[Any]:
    attention, mlp = layer.self_attn, layer.mlp
    return [
        *(attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj),
        *(mlp.gate_proj, mlp.up_proj, mlp.down_proj),
    ]

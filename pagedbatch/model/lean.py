"""A leaner forward than the library's, for decoders built like Llama on a CPU. Knows no sequence and no queue.

The same arithmetic with less around it: weights laid out once as oneDNN wants them, one product for queries, keys and
values, gates and residuals taken in by the products themselves, one pass for each norm and rotation, and in the last
layer only the tokens whose logits are wanted. A family that is not listed, or a model that differs from
its family in any part, keeps the plain forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from pagedbatch_kernels.cpu.layers import LayerOps
from pagedbatch_kernels.interface import AttentionBatch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from pagedbatch.model.attention import PagedAttention
from pagedbatch.model.input_batch import InputBatch
from pagedbatch.model.support import sliding_windows

#: Model types whose decoder layer is Llama's, with or without biases, head norms, windows and layers without positions.
#: `tests/test_lean.py` compares each with the plain forward.
LEAN_MODEL_TYPES = frozenset({"cwm", "llama", "ministral", "mistral", "qwen2", "qwen3", "seed_oss", "smollm3"})

#: Rows that oneDNN is told to expect when it chooses a layout; other numbers are hardly slower with it. Told of 64, it
#: lays tall matrices (the MLP's way down) out so that 64 rows and 128 take a tenth longer.
_EXPECTED_ROWS = 128


class PackedLinear:
    """Linear layers with one input as one product, their outputs side by side.

    Takes the weights over: the layers lose theirs, so that none stands in memory twice.
    """

    def __init__(self, *layers: nn.Linear, keep: bool) -> None:
        weight = (
            torch.cat([layer.weight.detach() for layer in layers]) if len(layers) > 1 else layers[0].weight.detach()
        )
        biases = [
            weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias.detach() for layer in layers
        ]
        self._bias = torch.cat(biases) if any(layer.bias is not None for layer in layers) else None
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _EXPECTED_ROWS)
        if not keep:
            for layer in layers:
                layer.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)

    def __call__(self, rows: Tensor) -> Tensor:
        """[num_tokens, out_features] for [num_tokens, in_features]."""
        return self._with(rows, "none")

    def silu(self, rows: Tensor) -> Tensor:
        """SiLU of the product."""
        return self._with(rows, "swish")

    def times(self, gates: Tensor, rows: Tensor) -> Tensor:
        """The product times `gates` [num_tokens, out_features]."""
        return self._with_other(rows, gates, "mul")

    def plus(self, residual: Tensor, rows: Tensor) -> Tensor:
        """The product and `residual` [num_tokens, out_features]."""
        return self._with_other(rows, residual, "add")

    def _with(self, rows: Tensor, activation: str) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, activation, [], "")
        return result

    def _with_other(self, rows: Tensor, other: Tensor, operation: str) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise.binary(rows, other, self._weight, self._bias, operation)
        return result


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
    qkv: PackedLinear
    query_norm: Tensor | None  #: [head_size], a norm's weight
    key_norm: Tensor | None
    head_norm_epsilon: float
    rotates: bool
    scale: float
    sliding_window: int | None
    output: PackedLinear
    mlp_norm: Norm
    gate: PackedLinear
    up: PackedLinear
    down: PackedLinear

    @classmethod
    def of(cls, module: Any, sliding_window: int | None, *, keep: bool) -> Layer:
        attention, mlp = module.self_attn, module.mlp
        has_norms = hasattr(attention, "q_norm")
        return cls(
            input_norm=Norm.of(module.input_layernorm),
            qkv=PackedLinear(attention.q_proj, attention.k_proj, attention.v_proj, keep=keep),
            query_norm=attention.q_norm.weight.detach() if has_norms else None,
            key_norm=attention.k_norm.weight.detach() if has_norms else None,
            head_norm_epsilon=attention.q_norm.variance_epsilon if has_norms else 0.0,
            rotates=bool(getattr(attention, "use_rope", True)),
            scale=attention.scaling,
            sliding_window=sliding_window,
            output=PackedLinear(attention.o_proj, keep=keep),
            mlp_norm=Norm.of(module.post_attention_layernorm),
            gate=PackedLinear(mlp.gate_proj, keep=keep),
            up=PackedLinear(mlp.up_proj, keep=keep),
            down=PackedLinear(mlp.down_proj, keep=keep),
        )


class LeanForward:
    """Runs the model's layers in place of its own `forward`.

    Args:
        model: one that `can_run_lean`.
        keep_model: leave it its weights, at the price of a second copy; else it can't be called afterwards.
    """

    def __init__(self, model: Any, attention: PagedAttention, ops: LayerOps, *, keep_model: bool) -> None:
        self._attention = attention
        self._ops = ops
        self._num_heads: int = model.config.num_attention_heads
        self._head_size: int = model.model.layers[0].self_attn.head_dim
        self._embeddings: Tensor = model.model.embed_tokens.weight.detach()
        self._rotary: Callable[..., tuple[Tensor, Tensor]] = model.model.rotary_emb
        self._layers = [
            Layer.of(layer, window, keep=keep_model)
            for layer, window in zip(model.model.layers, sliding_windows(model.config), strict=True)
        ]
        self._norm = Norm.of(model.model.norm)
        is_tied = model.lm_head.weight is model.model.embed_tokens.weight  # whose rows are looked up
        self._head = PackedLinear(model.lm_head, keep=keep_model or is_tied)
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
        if len(batch.logits_indices) == 0:  # this step only fills the pool
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
            self._ops.rotate_and_store(
                qkv,
                self._attention.cache[number],
                batch.attention.slot_mapping,
                rotation if layer.rotates else None,
                query_norm=layer.query_norm,
                key_norm=layer.key_norm,
                epsilon=layer.head_norm_epsilon,
            )
        return qkv[:, : self._num_heads]

    def _finish(self, number: int, layer: Layer, hidden: Tensor, queries: Tensor, attention: AttentionBatch) -> Tensor:
        """The layer's output [num_rows, hidden_size] for its input at the rows of `queries`."""
        with self._attention.timed():
            attended = self._attention.backend.paged_attention(
                queries,
                self._attention.cache[number],
                attention,
                scale=layer.scale,
                sliding_window=layer.sliding_window,
            )
        hidden = layer.output.plus(hidden, attended.view(len(hidden), -1))
        normed = self._normed(hidden, layer.mlp_norm)
        return layer.down.plus(hidden, layer.up.times(layer.gate.silu(normed), normed))

    def _normed(self, hidden: Tensor, norm: Norm) -> Tensor:
        return self._ops.rms_norm(hidden, norm.weight, norm.epsilon)


def can_run_lean(model: Any) -> bool:
    """Whether `LeanForward` computes what the model's own forward does."""
    config = model.config
    if config.model_type not in LEAN_MODEL_TYPES or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if model.device.type != "cpu" or model.dtype not in (torch.float32, torch.bfloat16):
        return False
    rotated = model.model.rotary_emb.inv_freq.numel() * 2  # partial rotation leaves some elements alone
    return type(model.lm_head) is nn.Linear and all(
        layer.self_attn.head_dim == rotated
        and type(layer.mlp.act_fn) in (nn.SiLU, SiLUActivation)
        and all(type(module) is nn.Linear for module in _linears(layer))
        for layer in model.model.layers
    )


def _linears(layer: Any) -> list[Any]:
    attention, mlp = layer.self_attn, layer.mlp
    return [
        *(attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj),
        *(mlp.gate_proj, mlp.up_proj, mlp.down_proj),
    ]

"""A fused forward for encoder-decoders built like BART or T5, on a CPU.

The arithmetic of transformers in fewer passes: packed weights, one GEMM for queries, keys and values, and one for a
cross-attention's keys and values; biases, activations and residual additions inside the GEMMs, one pass per norm. The
attention is that of encoder_decoder.py. A model that differs from its family in any part keeps the forward of
transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from pagedbatch_kernels.cpu.gemm import Activation
from pagedbatch_kernels.cpu.norm_rope import NormRope
from torch import Tensor, nn
from transformers.activations import GELUActivation, NewGELUActivation, SiLUActivation

from pagedbatch.model.attention import PagedAttention
from pagedbatch.model.encoder_decoder import CrossAttention, EncoderAttention, position_biases, position_table
from pagedbatch.model.fused_checks import holds_only_weights, holds_weights, is_untouched
from pagedbatch.model.input_batch import InputBatch
from pagedbatch.model.packed_linear import Linear, Linears, ResidualLinear

#: Families by where their norms are: before each block, with a residual around both, or after each addition.
_PRE_NORM = frozenset({"blenderbot", "m2m_100", "mbart", "mt5", "pegasus", "t5", "umt5"})
_POST_NORM = frozenset({"bart", "marian", "plbart"})
FUSED_ENCODER_DECODERS = _PRE_NORM | _POST_NORM

_ACTIVATIONS: dict[type, Activation] = {
    nn.ReLU: "relu",
    nn.SiLU: "silu",
    SiLUActivation: "silu",
    nn.GELU: "gelu",
    GELUActivation: "gelu",
    NewGELUActivation: "gelu_tanh",
}

Norm = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class SelfBlock:
    """A self-attention and its norm."""

    norm: Norm
    qkv: Linear
    output: ResidualLinear
    num_heads: int
    scale: float


@dataclass(frozen=True, slots=True)
class CrossBlock:
    """A cross-attention and its norm. `key_value` is for sources, which are encoded once."""

    norm: Norm
    query: Linear
    key_value: Linear
    output: ResidualLinear
    num_heads: int
    scale: float


@dataclass(frozen=True, slots=True)
class MlpBlock:
    """An MLP and its norm; `up` has the activation in it."""

    norm: Norm
    up: Linear
    down: ResidualLinear


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of an encoder, or of a decoder, which has a `cross` block."""

    attention: SelfBlock
    cross: CrossBlock | None
    mlp: MlpBlock


@dataclass(frozen=True, slots=True)
class Stack:
    """An encoder or a decoder: embeddings, layers and the norms around them."""

    embeddings: Tensor  #: [vocab_size, hidden_size]
    scale: float  #: of the embeddings
    positions: Tensor | None  #: [max_positions, hidden_size]
    first_norm: Norm | None
    layers: list[Layer]
    last_norm: Norm | None
    norms_first: bool  #: before each block; else after each addition

    def embed(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """[num_tokens, hidden_size] for int64 [num_tokens] each."""
        hidden = self.embeddings[input_ids]
        if self.scale != 1.0:
            hidden *= self.scale
        if self.positions is not None:
            hidden += self.positions[position_ids]
        return hidden if self.first_norm is None else self.first_norm(hidden)

    def add(self, norm: Norm, block: Callable[[Tensor, Tensor], Tensor], hidden: Tensor) -> Tensor:
        """`block(input, residual)` around its norm."""
        return block(norm(hidden), hidden) if self.norms_first else norm(block(hidden, hidden))


class FusedEncoderDecoder:
    """Runs the model's layers in place of its own `forward`.

    Args:
        model: one for which `can_run_fused` is true.
        keep_model: the model keeps its weights, at the price of a second copy; else it can't be called afterwards.
    """

    def __init__(
        self,
        model: Any,
        attention: PagedAttention,
        ops: NormRope,
        linears: Linears,
        *,
        block_size: int,
        max_positions: int,
        keep_model: bool,
    ) -> None:
        encoder, decoder = model.get_encoder(), model.get_decoder()
        self._attention = attention
        self._cross = CrossAttention(attention)
        self._own = EncoderAttention(attention, block_size, position_biases(encoder))
        attention.position_bias = position_biases(decoder)
        norms_first = model.config.model_type in _PRE_NORM
        self._encoder, self._decoder = (
            _stack(stack, ops, linears, max_positions, norms_first=norms_first, keep=keep_model)
            for stack in (encoder, decoder)
        )
        self._head = linears.linear(_head(model), keep=True)  # tied weights are embeddings, too
        scales = getattr(model.config, "scale_decoder_outputs", False)
        self._output_scale = model.config.d_model**-0.5 if scales else 1.0

    def __call__(self, batch: InputBatch) -> Tensor:
        """Logits [num_logits, vocab_size] of the positions that need them."""
        assert batch.source is not None
        self._cross.batch = batch.source
        new = batch.source.encoder
        encoded = None
        if new is not None:
            self._own.batch = new
            encoded = self._encode(new.input_ids[0], new.position_ids[0])
        stack = self._decoder
        hidden = stack.embed(batch.input_ids[0], batch.position_ids[0])
        for number, layer in enumerate(stack.layers):
            hidden = self._attend(stack, number, layer.attention, hidden, self._attention)
            assert layer.cross is not None
            hidden = self._attend_across(stack, number, layer.cross, hidden, encoded)
            hidden = _feed_forward(stack, layer.mlp, hidden)
        hidden = hidden[batch.logits_indices]
        if stack.last_norm is not None:
            hidden = stack.last_norm(hidden)
        return self._head(hidden if self._output_scale == 1.0 else hidden * self._output_scale)

    def _encode(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """[num_source_tokens, hidden_size]."""
        stack = self._encoder
        hidden = stack.embed(input_ids, position_ids)
        for number, layer in enumerate(stack.layers):
            hidden = self._attend(stack, number, layer.attention, hidden, self._own)
            hidden = _feed_forward(stack, layer.mlp, hidden)
        return hidden if stack.last_norm is None else stack.last_norm(hidden)

    def _attend(
        self, stack: Stack, number: int, block: SelfBlock, hidden: Tensor, attention: PagedAttention | EncoderAttention
    ) -> Tensor:
        def attended(normed: Tensor, residual: Tensor) -> Tensor:
            query, key, value = block.qkv(normed).view(len(normed), 3, block.num_heads, -1).unbind(1)
            output = attention.attend(number, query, key, value, scale=block.scale)
            return block.output(output.view(len(normed), -1), residual)

        return stack.add(block.norm, attended, hidden)

    def _attend_across(
        self, stack: Stack, number: int, block: CrossBlock, hidden: Tensor, encoded: Tensor | None
    ) -> Tensor:
        key = value = hidden  # not read where no source is new
        if encoded is not None:
            key, value = block.key_value(encoded).view(len(encoded), 2, block.num_heads, -1).unbind(1)

        def attended(normed: Tensor, residual: Tensor) -> Tensor:
            query = block.query(normed).view(len(normed), block.num_heads, -1)
            output = self._cross.attend(number, query, key, value, scale=block.scale)
            return block.output(output.view(len(normed), -1), residual)

        return stack.add(block.norm, attended, hidden)


def _feed_forward(stack: Stack, block: MlpBlock, hidden: Tensor) -> Tensor:
    return stack.add(block.norm, lambda normed, residual: block.down(block.up(normed), residual), hidden)


def _stack(stack: Any, ops: NormRope, linears: Linears, max_positions: int, *, norms_first: bool, keep: bool) -> Stack:
    def norm(name: str) -> Norm | None:
        return _norm(getattr(stack, name), ops) if hasattr(stack, name) else None

    build = _t5_layer if hasattr(stack, "block") else _bart_layer
    embeddings = stack.embed_tokens
    return Stack(
        embeddings=embeddings.weight.detach(),
        scale=float(getattr(embeddings, "embed_scale", None) or getattr(stack, "embed_scale", None) or 1.0),
        positions=position_table(stack, max_positions),
        first_norm=norm("layernorm_embedding"),
        layers=[build(layer, ops, linears, keep) for layer in _layers(stack)],
        last_norm=norm("layer_norm") or norm("final_layer_norm"),
        norms_first=norms_first,
    )


def _bart_layer(layer: Any, ops: NormRope, linears: Linears, keep: bool) -> Layer:
    own, cross = layer.self_attn, getattr(layer, "encoder_attn", None)
    projections = [(each.q_proj, each.k_proj, each.v_proj, each.out_proj) for each in (own, cross) if each is not None]
    norms = [_norm(layer.self_attn_layer_norm, ops)]
    if cross is not None:
        norms.append(_norm(layer.encoder_attn_layer_norm, ops))
    up = linears.linear(layer.fc1, keep=keep, activation=_ACTIVATIONS[type(layer.activation_fn)])
    mlp = MlpBlock(_norm(layer.final_layer_norm, ops), up, linears.linear(layer.fc2, keep=keep))
    return _layer(norms, projections, own.num_heads, own.scaling, mlp, linears, keep)


def _t5_layer(block: Any, ops: NormRope, linears: Linears, keep: bool) -> Layer:
    *attentions, mlp = block.layer
    own, dense = attentions[0].SelfAttention, mlp.DenseReluDense
    modules = [own, *(each.EncDecAttention for each in attentions[1:])]
    projections = [(each.q, each.k, each.v, each.o) for each in modules]
    norms = [_norm(each.layer_norm, ops) for each in attentions]
    activation = _ACTIVATIONS[type(dense.act)]
    if hasattr(dense, "wi_0"):
        up = linears.gated(dense.wi_0, dense.wi_1, activation, keep=keep)
    else:
        up = linears.linear(dense.wi, keep=keep, activation=activation)
    mlp = MlpBlock(_norm(mlp.layer_norm, ops), up, linears.linear(dense.wo, keep=keep))
    return _layer(norms, projections, own.n_heads, own.scaling, mlp, linears, keep)


def _layer(
    norms: list[Norm],
    projections: list[tuple[nn.Linear, nn.Linear, nn.Linear, nn.Linear]],
    num_heads: int,
    scale: float,
    mlp: MlpBlock,
    linears: Linears,
    keep: bool,
) -> Layer:
    """A layer from the query, key, value and output projections of its self-attention and, in a decoder, its
    cross-attention."""
    query, key, value, output = projections[0]
    qkv = linears.linear(query, key, value, keep=keep)
    own = SelfBlock(norms[0], qkv, linears.linear(output, keep=keep), num_heads, scale)
    cross = None
    if len(projections) > 1:
        query, key, value, output = projections[1]
        asks, reads = linears.linear(query, keep=keep), linears.linear(key, value, keep=keep)
        cross = CrossBlock(norms[1], asks, reads, linears.linear(output, keep=keep), num_heads, scale)
    return Layer(own, cross, mlp)


def _norm(module: Any, ops: NormRope) -> Norm:
    weight = module.weight.detach()
    if isinstance(module, nn.LayerNorm):
        bias = None if module.bias is None else module.bias.detach()
        return lambda hidden: ops.layer_norm(hidden, weight, bias, module.eps)
    return lambda hidden: ops.rms_norm(hidden, weight, module.variance_epsilon)


def _head(model: Any) -> nn.Linear:
    """The output layer, with `final_logits_bias` as its bias."""
    own = model.get_output_embeddings()
    head = nn.Linear(own.in_features, own.out_features, bias=False, device="meta")
    head.weight = own.weight
    bias = getattr(model, "final_logits_bias", None)
    if bias is not None:
        head.bias = nn.Parameter(bias[0].to(own.weight.dtype), requires_grad=False)
    return head


def can_run_fused(model: Any) -> bool:
    """Whether `FusedEncoderDecoder` computes the same as the model's own forward."""
    if model.config.model_type not in FUSED_ENCODER_DECODERS:
        return False
    if model.device.type != "cpu" or model.dtype not in (torch.float32, torch.bfloat16):
        return False
    head, stacks = model.get_output_embeddings(), (model.get_encoder(), model.get_decoder())
    if not all(is_untouched(module) for module in model.modules() if module is not head):
        return False
    if not holds_weights(head, nn.Linear, model.dtype) or head.bias is not None:
        return False
    embeddings = [stack.embed_tokens for stack in stacks]
    modules = [module for stack in stacks for layer in _layers(stack) for module in layer.modules()]
    linears = [module for module in modules if isinstance(module, nn.Linear)]
    return (
        all(holds_only_weights(each, model.dtype) for each in embeddings)
        and all(holds_weights(each, nn.Linear, model.dtype) and each.in_features % 2 == 0 for each in linears)
        and all(type(each) in _ACTIVATIONS for each in _activations(stacks))
    )


def _layers(stack: Any) -> Any:
    return stack.block if hasattr(stack, "block") else stack.layers


def _activations(stacks: tuple[Any, ...]) -> Iterator[Any]:
    for stack in stacks:
        for layer in _layers(stack):
            yield layer.layer[-1].DenseReluDense.act if hasattr(layer, "layer") else layer.activation_fn

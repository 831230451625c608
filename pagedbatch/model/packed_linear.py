"""A decoder's linear layers on a CPU, whose weights are packed once: by our C++ library, or by oneDNN.

oneDNN is used where the CPU has instructions for matrices of bfloat16. Either takes the weights over: the layers
release theirs, so that no weight is in memory twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol, TypeAlias

import torch
from pagedbatch_kernels.cpu.gemm import Activation, PackedGemm
from torch import Tensor, nn

from pagedbatch.model.padded_gemm import pad_to_tiles

#: Number of tokens for which oneDNN chooses a layout; other numbers are hardly slower with it. For 64, it packs tall
#: matrices (the MLP's down projection) so that both 64 and 128 tokens take a tenth longer.
_EXPECTED_TOKENS = 128

#: oneDNN's names: an operation, and which way it is computed.
_ONEDNN_ACTIVATIONS: dict[Activation, tuple[str, str]] = {
    "identity": ("none", ""),
    "relu": ("relu", ""),
    "silu": ("swish", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
}

_Weights: TypeAlias = "tuple[Tensor, Tensor | None]"


class Linear(Protocol):
    """Maps [num_tokens, in_features] to [num_tokens, out_features]."""

    def __call__(self, hidden: Tensor, /) -> Tensor: ...


class ResidualLinear(Linear, Protocol):
    def __call__(self, hidden: Tensor, residual: Tensor | None = None, /) -> Tensor:
        """`residual` [num_tokens, out_features] is added."""
        ...


class Linears(Protocol):
    """Packs layers. `keep`: the layers keep their weights, at the price of a second copy."""

    def linear(self, *layers: nn.Linear, keep: bool, activation: Activation = "identity") -> ResidualLinear:
        """Layers with the same input; their outputs are concatenated. With an activation there is no residual."""
        ...

    def gated(self, gate: nn.Linear, up: nn.Linear, activation: Activation, *, keep: bool) -> Linear:
        """activation(gate(hidden)) * up(hidden)."""
        ...


class PackedLinears:
    """By our C++ library (gemm.cpp): a token's outputs have the same bits whatever it is batched with."""

    def __init__(self, gemm: PackedGemm) -> None:
        self._gemm = gemm

    def linear(self, *layers: nn.Linear, keep: bool, activation: Activation = "identity") -> ResidualLinear:
        packed = self._gemm.pack([layer.weight.detach() for layer in layers], [_bias(layer) for layer in layers])
        _release_weights(layers, keep)
        return partial(self._gemm.matmul, packed, activation=activation)

    def gated(self, gate: nn.Linear, up: nn.Linear, activation: Activation, *, keep: bool) -> Linear:
        packed = self._gemm.pack_gated(gate.weight.detach(), up.weight.detach(), [_bias(gate), _bias(up)])
        _release_weights((gate, up), keep)
        return partial(self._gemm.matmul, packed, activation=activation)


class OneDnnLinears:
    """By oneDNN: rounding depends on the number of tokens. Inputs are padded (padded_gemm.py)."""

    def linear(self, *layers: nn.Linear, keep: bool, activation: Activation = "identity") -> ResidualLinear:
        return partial(_onednn_linear, *_pack_for_onednn(layers, keep), _ONEDNN_ACTIVATIONS[activation])

    def gated(self, gate: nn.Linear, up: nn.Linear, activation: Activation, *, keep: bool) -> Linear:
        packed = _pack_for_onednn((gate,), keep), _pack_for_onednn((up,), keep)
        return partial(_onednn_gated, *packed, _ONEDNN_ACTIVATIONS[activation])


def _pack_for_onednn(layers: Sequence[nn.Linear], keep: bool) -> tuple[Tensor, Tensor | None]:
    """Weights in oneDNN's layout, and biases [out_features], None if there are none."""
    weights = [pad_to_tiles(layer.weight.detach()) for layer in layers]
    biases = [_bias(layer) for layer in layers]
    bias = None
    if any(each is not None for each in biases):
        zeros = [layer.weight.new_zeros(layer.out_features) for layer in layers]
        bias = torch.cat([zero if each is None else each for each, zero in zip(biases, zeros, strict=True)])
    weight = torch.cat(weights) if len(weights) > 1 else weights[0]
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _EXPECTED_TOKENS)
    _release_weights(layers, keep)
    return packed, bias


def _onednn_linear(
    weight: Tensor, bias: Tensor | None, activation: tuple[str, str], hidden: Tensor, residual: Tensor | None = None
) -> Tensor:
    hidden = pad_to_tiles(hidden)
    result: Tensor
    if residual is None:
        result = torch.ops.mkldnn._linear_pointwise(hidden, weight, bias, activation[0], [], activation[1])
    else:
        result = torch.ops.mkldnn._linear_pointwise.binary(hidden, residual, weight, bias, "add")
    return result


def _onednn_gated(gate: _Weights, up: _Weights, activation: tuple[str, str], hidden: Tensor) -> Tensor:
    hidden = pad_to_tiles(hidden)
    gates = torch.ops.mkldnn._linear_pointwise(hidden, *gate, activation[0], [], activation[1])
    result: Tensor = torch.ops.mkldnn._linear_pointwise.binary(hidden, gates, *up, "mul")
    return result


def _bias(layer: nn.Linear) -> Tensor | None:
    return None if layer.bias is None else layer.bias.detach()


def _release_weights(layers: Sequence[nn.Linear], keep: bool) -> None:
    """Empties the weights of layers, unless they are to be kept."""
    for layer in () if keep else layers:
        layer.weight = nn.Parameter(layer.weight.new_empty(0), requires_grad=False)


def choose_linears(dtype: torch.dtype) -> Linears:
    """oneDNN if the CPU has instructions for matrices of `dtype`, else our C++ library."""
    gemm = PackedGemm()
    if dtype == torch.bfloat16 and gemm.has_matrix_unit and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return OneDnnLinears()
    return PackedLinears(gemm)

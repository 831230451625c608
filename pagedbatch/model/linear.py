"""A decoder's linear layers on a CPU, as products with weights laid out once. Knows no layer's place in a model.

By our own library, or, where the CPU has instructions for matrices of bfloat16, by oneDNN. Either takes the weights
over: the layers lose theirs, so that none stands in memory twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol, TypeAlias

import torch
from pagedbatch_kernels.cpu.gemm import PackedGemm
from torch import Tensor, nn

from pagedbatch.model.padded_gemm import pad_to_tiles

#: Rows that oneDNN is told to expect when it chooses a layout; other numbers are hardly slower with it. Told of 64, it
#: lays tall matrices (the MLP's way down) out so that 64 rows and 128 take a tenth longer.
_EXPECTED_ROWS = 128

_Weights: TypeAlias = "tuple[Tensor, Tensor | None]"


class Linear(Protocol):
    """A product: [num_tokens, out_features] for [num_tokens, in_features]."""

    def __call__(self, rows: Tensor, /) -> Tensor: ...


class ResidualLinear(Linear, Protocol):
    def __call__(self, rows: Tensor, residual: Tensor | None = None, /) -> Tensor:
        """`residual` [num_tokens, out_features] is added."""
        ...


class Linears(Protocol):
    """One of the two ways. `keep`: the layers keep their weights, at the price of a second copy."""

    def linear(self, *layers: nn.Linear, keep: bool) -> ResidualLinear:
        """Layers with one input, their outputs side by side."""
        ...

    def gated(self, gate: nn.Linear, up: nn.Linear, *, keep: bool) -> Linear:
        """SiLU of what `gate` gives, times what `up` gives."""
        ...


class PackedLinears:
    """By our own library: a token's outputs are the same bits whatever it is batched with."""

    def __init__(self, gemm: PackedGemm) -> None:
        self._gemm = gemm

    def linear(self, *layers: nn.Linear, keep: bool) -> ResidualLinear:
        panels = self._gemm.pack([layer.weight.detach() for layer in layers], [_bias(layer) for layer in layers])
        _release_weights(layers, keep)
        return partial(self._gemm.matmul, panels)

    def gated(self, gate: nn.Linear, up: nn.Linear, *, keep: bool) -> Linear:
        panels = self._gemm.pack_swiglu(gate.weight.detach(), up.weight.detach(), [_bias(gate), _bias(up)])
        _release_weights((gate, up), keep)
        return partial(self._gemm.matmul, panels)


class OneDnnLinears:
    """By oneDNN: how a token's outputs are rounded depends on how many there are. Rows are padded (padded_gemm.py)."""

    def linear(self, *layers: nn.Linear, keep: bool) -> ResidualLinear:
        return partial(_product, *_reordered(layers, keep))

    def gated(self, gate: nn.Linear, up: nn.Linear, *, keep: bool) -> Linear:
        return partial(_gated_product, _reordered((gate,), keep), _reordered((up,), keep))


def _reordered(layers: Sequence[nn.Linear], keep: bool) -> tuple[Tensor, Tensor | None]:
    """Weights as oneDNN wants them, and biases [out_features], if there are any."""
    weights = [pad_to_tiles(layer.weight.detach()) for layer in layers]
    biases = [_bias(layer) for layer in layers]
    bias = None
    if any(each is not None for each in biases):
        zeros = [layer.weight.new_zeros(layer.out_features) for layer in layers]
        bias = torch.cat([zero if each is None else each for each, zero in zip(biases, zeros, strict=True)])
    weight = torch.cat(weights) if len(weights) > 1 else weights[0]
    reordered = torch.ops.mkldnn._reorder_linear_weight(weight, _EXPECTED_ROWS)
    _release_weights(layers, keep)
    return reordered, bias


def _product(weight: Tensor, bias: Tensor | None, rows: Tensor, residual: Tensor | None = None) -> Tensor:
    rows = pad_to_tiles(rows)
    result: Tensor
    if residual is None:
        result = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    else:
        result = torch.ops.mkldnn._linear_pointwise.binary(rows, residual, weight, bias, "add")
    return result


def _gated_product(gate: _Weights, up: _Weights, rows: Tensor) -> Tensor:
    rows = pad_to_tiles(rows)
    gates = torch.ops.mkldnn._linear_pointwise(rows, *gate, "swish", [], "")
    result: Tensor = torch.ops.mkldnn._linear_pointwise.binary(rows, gates, *up, "mul")
    return result


def _bias(layer: nn.Linear) -> Tensor | None:
    return None if layer.bias is None else layer.bias.detach()


def _release_weights(layers: Sequence[nn.Linear], keep: bool) -> None:
    """Takes their weights, unless they are to be kept."""
    for layer in () if keep else layers:
        layer.weight = nn.Parameter(layer.weight.new_empty(0), requires_grad=False)


def choose_linears(dtype: torch.dtype) -> Linears:
    """oneDNN's where it has instructions for matrices of `dtype`, else our own."""
    gemm = PackedGemm()
    if dtype == torch.bfloat16 and gemm.has_matrix_unit and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return OneDnnLinears()
    return PackedLinears(gemm)

"""Matrix products with packed weights, float32 or bfloat16: gemm.cpp.

A token's result does not depend on its batch: each element is one float32 sum, always in the same order, rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, get_args

import torch
from torch import Tensor

from pagedbatch_kernels.cpu.library import GemmArgs, is_bfloat16, load_kernels, pointer

Activation = Literal["identity", "relu", "silu", "gelu", "gelu_tanh"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)  #: `Activation` of activation.h


@dataclass(slots=True, eq=False)
class PackedWeight:
    """A weight matrix [n, k], or with `is_gated` two of that shape, in the order in which gemm.cpp reads it."""

    panels: Tensor
    bias: Tensor | None  #: float32, in the same order
    k: int
    n: int
    is_gated: bool
    location: tuple[int, int, int]  #: address, packed elements per row, number of panels
    next_location: tuple[int, int, int] = (0, 0, 0)  #: of the weight that was used after this one


class PackedGemm:
    """

    Raises:
        BuildError: it can't be built or loaded.
    """

    def __init__(self) -> None:
        self._library = load_kernels()
        # Weights are used in the same order step after step, so each learns which one to prefetch at its end: only its
        # location, since a reference would keep it alive.
        self._last: PackedWeight | None = None

    @property
    def has_matrix_unit(self) -> bool:
        """Whether the CPU has matrix instructions for bfloat16: with them, oneDNN is several times as fast."""
        return bool(self._library.pagedbatch_has_matrix_unit())

    def pack(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> PackedWeight:
        """Packs `weights` [n of each, k] and `biases` [n of each] for a product with all of them side by side.

        Raises:
            ValueError: matrices that don't fit each other, or an odd k in bfloat16.
        """
        *firsts, n = accumulate(map(len, weights), initial=0)
        return self._pack(weights, biases, firsts, n, is_gated=False)

    def pack_gated(self, gate: Tensor, up: Tensor, biases: Sequence[Tensor | None]) -> PackedWeight:
        """Packs two matrices [n, k] for activation(x @ gate.T) * (x @ up.T) (arXiv 2002.05202).

        Raises:
            ValueError: as `pack`.
        """
        if gate.shape != up.shape:
            raise ValueError(f"gate is {list(gate.shape)}, up {list(up.shape)}")
        half_panel = self._library.pagedbatch_panel_width() // 2
        return self._pack((gate, up), biases, (0, half_panel), len(gate), is_gated=True)

    def _pack(
        self,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        firsts: Sequence[int],
        n: int,
        *,
        is_gated: bool,
    ) -> PackedWeight:
        k, dtype = weights[0].shape[1], weights[0].dtype
        pair = 4 // dtype.itemsize
        if k % pair:
            raise ValueError(f"k = {k} is odd: bfloat16 is packed in pairs")
        width = self._library.pagedbatch_panel_width()
        num_panels = -(-n // (width // 2 if is_gated else width))
        panels = torch.zeros(num_panels * width * k, dtype=dtype)
        bias = None if all(each is None for each in biases) else torch.zeros(num_panels * width)

        def put(rows: Tensor, shape: tuple[int, int], to: Tensor, first: int) -> None:
            address = pointer(rows, to.dtype, shape)
            self._library.pagedbatch_pack(address, *shape, to.data_ptr(), first, is_gated, is_bfloat16(rows))

        for weight, own_bias, first in zip(weights, biases, firsts, strict=True):
            put(weight, (len(weight), k), panels, first)
            if own_bias is not None and bias is not None:
                put(own_bias.float().unsqueeze(1), (len(weight), 1), bias, first)
        return PackedWeight(panels, bias, k, n, is_gated, (panels.data_ptr(), k // pair, num_panels))

    def matmul(
        self,
        weight: PackedWeight,
        x: Tensor,
        residual: Tensor | None = None,
        activation: Activation = "identity",
    ) -> Tensor:
        """[m, n] for `x` [m, k].

        `activation` is applied to the product with its bias, or of two matrices to the gate; then `residual` [m, n] is
        added. "gelu_tanh" is the "gelu_new" of transformers.

        Raises:
            ValueError: shapes or dtypes that don't fit each other.
        """
        m, dtype = len(x), weight.panels.dtype
        output = x.new_empty(m, weight.n)
        next_weight, next_k, next_num_panels = weight.next_location
        args = GemmArgs(
            input=pointer(x, dtype, (m, weight.k)),
            weight=weight.panels.data_ptr(),
            bias=None if weight.bias is None else weight.bias.data_ptr(),
            residual=None if residual is None else pointer(residual, dtype, (m, weight.n)),
            output=output.data_ptr(),
            next_weight=next_weight,
            m=m,
            k=weight.k,
            n=weight.n,
            next_k=next_k,
            next_num_panels=next_num_panels,
            is_gated=weight.is_gated,
            activation=ACTIVATIONS.index(activation),
            is_bfloat16=is_bfloat16(x),
            num_threads=torch.get_num_threads(),
        )
        if self._last is not None:
            self._last.next_location = weight.location
        self._last = weight
        self._library.pagedbatch_gemm(args)
        return output

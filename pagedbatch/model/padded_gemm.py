"""Matrix products of 16-bit numbers on a CPU, with rows padded to whole tiles. Knows no model's layers.

oneDNN multiplies rows of bfloat16 and float16 by tiles of 32 elements where the CPU has a matrix unit (AMX). Of a row
whose size is no multiple of 32 it reads the last tile past the end, into the next token's row. What it finds there is
multiplied by zero, which is harmless until it is NaN or infinite: one token's then spreads to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_TILE = 32
_HALVES = (torch.bfloat16, torch.float16)

#: Functions of two factors -> the place of the first among their arguments. The dimension that is summed over is the
#: last of the first factor and the last but one of the second, or that of a vector.
_PRODUCTS: dict[Any, int] = {
    **dict.fromkeys((torch.matmul, torch.mm, torch.bmm, torch.mv, torch._grouped_mm), 0),
    **dict.fromkeys((Tensor.matmul, Tensor.__matmul__, Tensor.mm, Tensor.bmm, Tensor.mv), 0),
    **dict.fromkeys((torch.addmm, torch.baddbmm, torch.addmv, Tensor.addmm, Tensor.baddbmm, Tensor.addmv), 1),
    **({functional.grouped_mm: 0} if hasattr(functional, "grouped_mm") else {}),
}


def pad_to_tiles(values: Tensor, dim: int = -1) -> Tensor:
    """`values` with zeros at the end of dimension `dim`, up to a multiple of 32."""
    missing = -values.shape[dim] % _TILE
    return functional.pad(values, (0, 0) * (-1 - dim) + (0, missing)) if missing else values


class PaddedGemm(TorchFunctionMode):
    """While it is on, both factors of each product of 16-bit numbers on a CPU are padded: results are the same.

    It works on torch's functions, so that it reaches linear layers, experts whose weights are one tensor, adapters and
    products that a model writes out; `torch.einsum` is not covered. Weights are padded anew each time, which costs a
    copy: a model whose layers fit the tiles, as all but the smallest do, runs without it, see `needs_padding`.
    """

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if function is functional.linear:
            return self._linear(*args, **kwargs)
        place = _PRODUCTS.get(function)
        if place is not None and len(args) >= place + 2 and _is_cut(args[place]):
            first, second = args[place : place + 2]
            padded = pad_to_tiles(first), pad_to_tiles(second, -1 if second.dim() == 1 else -2)
            args = (*args[:place], *padded, *args[place + 2 :])
        return function(*args, **kwargs)

    @staticmethod
    def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if _is_cut(input):
            input, weight = pad_to_tiles(input), pad_to_tiles(weight)
        return functional.linear(input, weight, bias)


def _is_cut(rows: Tensor) -> bool:
    return rows.dtype in _HALVES and rows.device.type == "cpu" and bool(rows.shape[-1] % _TILE)


def needs_padding(model: nn.Module) -> bool:
    """Whether any product with the model's weights may take rows that are no whole tiles.

    Linear layers say which dimension they sum over; of other weights it is either of the last two.
    """
    for module in model.modules():
        is_known = isinstance(module, nn.Linear | nn.Embedding)
        for weight in module.parameters(recurse=False):
            sizes = weight.shape[-1:] if is_known else weight.shape[-2:]
            is_matrix = weight.dim() >= 2 and weight.dtype in _HALVES and weight.device.type == "cpu"
            if is_matrix and any(size % _TILE for size in sizes):
                return True
    return False

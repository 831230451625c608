"""GEMMs of 16-bit numbers on a CPU, with the inner dimension padded to whole tiles.

Where the CPU has a matrix unit (AMX), oneDNN multiplies bfloat16 and float16 in tiles of 32 elements. If a vector's
size is no multiple of 32, it reads its last tile past the end, into the next token's vector. What it reads there is
multiplied by zero, which is harmless unless it is NaN or infinite: then that token's NaN spreads to the others.
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

#: Functions of two factors -> the index of the first factor among their arguments. The inner dimension is the last of
#: the first factor, and the last but one of the second or the only one of a vector.
_GEMMS: dict[Any, int] = {
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
    """Inside it, both factors of every GEMM of 16-bit numbers on a CPU are padded with zeros: results are the same.

    It intercepts torch's functions, so that it covers linear layers, experts whose weights are one tensor, adapters and
    GEMMs in a model's own code; `torch.einsum` is not covered. Weights are padded anew each time, which costs a copy:
    a model whose layers fit the tiles, as all but the smallest do, runs without it (`needs_padding`).
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
        first_index = _GEMMS.get(function)
        if first_index is not None and len(args) >= first_index + 2 and _is_cut(args[first_index]):
            first, second = args[first_index : first_index + 2]
            padded = pad_to_tiles(first), pad_to_tiles(second, -1 if second.dim() == 1 else -2)
            args = (*args[:first_index], *padded, *args[first_index + 2 :])
        return function(*args, **kwargs)

    @staticmethod
    def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if _is_cut(input):
            input, weight = pad_to_tiles(input), pad_to_tiles(weight)
        return functional.linear(input, weight, bias)


def _is_cut(values: Tensor) -> bool:
    return values.dtype in _HALVES and values.device.type == "cpu" and bool(values.shape[-1] % _TILE)


def needs_padding(model: nn.Module) -> bool:
    """Whether the inner dimension of any GEMM with the model's weights may be no multiple of the tile size.

    It is known for linear layers; for other weights it is either of the last two dimensions.
    """
    for module in model.modules():
        is_known = isinstance(module, nn.Linear | nn.Embedding)
        for weight in module.parameters(recurse=False):
            sizes = weight.shape[-1:] if is_known else weight.shape[-2:]
            is_matrix = weight.dim() >= 2 and weight.dtype in _HALVES and weight.device.type == "cpu"
            if is_matrix and any(size % _TILE for size in sizes):
                return True
    return False

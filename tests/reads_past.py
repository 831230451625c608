"""Matrix products that read rows past their end, as oneDNN does on a CPU with a matrix unit: in tiles of 32 elements.

What lies there is multiplied by zero, so that results are right as long as it is finite. Stands in for such a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

TILE = 32
#: Functions -> the place of the rows among their arguments.
PRODUCTS: dict[Any, int] = {
    **dict.fromkeys((functional.linear, torch.matmul, torch.mm, torch.bmm, torch._grouped_mm), 0),
    **dict.fromkeys((functional.grouped_mm, Tensor.matmul, Tensor.__matmul__, Tensor.mm, Tensor.bmm), 0),
    **dict.fromkeys((torch.ops.mkldnn._linear_pointwise, torch.ops.mkldnn._linear_pointwise.binary), 0),
    **dict.fromkeys((torch.addmm, torch.baddbmm), 1),
}


class ReadsPast(TorchFunctionMode):
    """While it is on. `num_cut` counts the products whose rows were no whole tiles."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        self._dtypes = dtypes
        self.num_gemms = self.num_cut = 0

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        place = PRODUCTS.get(function)
        if place is None or args[place].dtype not in self._dtypes:
            return result
        rows = args[place]
        self.num_gemms += 1
        missing = -rows.shape[-1] % TILE
        if not missing:
            return result
        self.num_cut += 1
        memory = functional.pad(rows.reshape(-1), (0, missing))
        past = (memory.unfold(0, missing, rows.shape[-1])[1:] * 0).sum(dim=-1).view(rows.shape[:-1])
        return result + (past if result.dim() < rows.dim() else past.unsqueeze(-1))

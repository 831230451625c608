"""What tensors the library's functions take: they get addresses alone."""

from __future__ import annotations

import torch
from torch import Tensor


def is_bfloat16(tensor: Tensor) -> bool:
    """
    Raises:
        ValueError: it is neither bfloat16 nor float32.
    """
    if tensor.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"expected float32 or bfloat16, got {tensor.dtype}")
    return tensor.dtype == torch.bfloat16


def check(tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """
    Raises:
        ValueError: it is another kind of tensor.
    """
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(f"expected contiguous {dtype} {list(shape)}, got {tensor.dtype} {list(tensor.shape)}")

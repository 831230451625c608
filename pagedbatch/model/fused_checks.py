"""Whether modules of transformers hold and compute just what their classes say, so that a fused forward may replace
them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized


def is_untouched(module: Any) -> bool:
    """Whether a module computes what its class says: quantisers add hooks and replace functions."""
    hooks = ("_forward_hooks", "_forward_pre_hooks")
    return (
        "forward" not in vars(module)
        and not any(getattr(module, name) for name in hooks)
        and not is_parametrized(module)
    )


def holds_weights(module: Any, kind: type[nn.Module], dtype: torch.dtype) -> bool:
    """Whether it is exactly of this class, with no tensor but a weight and maybe a bias of `dtype`."""
    return type(module) is kind and holds_only_weights(module, dtype)


def holds_only_weights(module: Any, dtype: torch.dtype) -> bool:
    """Whether it has no tensor but a weight and maybe a bias of `dtype`."""
    tensors = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
    return (
        set(tensors) <= {"weight", "bias"}
        and "weight" in tensors
        and all(type(each) in (Tensor, nn.Parameter) and each.dtype == dtype for each in tensors.values())
    )

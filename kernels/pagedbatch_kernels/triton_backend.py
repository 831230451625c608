"""The Triton backend: the functions of `interface.Backend`. Importing it needs triton, but no GPU."""

from __future__ import annotations

import torch

from pagedbatch_kernels import launch
from pagedbatch_kernels.interface import AttentionShape
from pagedbatch_kernels.prefix_groups import PrefixCosts
from pagedbatch_kernels.reference import allocate_cache
from pagedbatch_kernels.triton_attention import paged_attention
from pagedbatch_kernels.triton_cache import copy_blocks, swap_blocks, write_kv
from pagedbatch_kernels.triton_device import device_limits

__all__ = ["allocate_cache", "copy_blocks", "paged_attention", "prefix_costs", "swap_blocks", "write_kv"]


def prefix_costs(attention: AttentionShape, device: torch.device) -> PrefixCosts:
    """See `interface.Backend.prefix_costs`."""
    return launch.prefix_costs(
        device_limits(device),
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_size=attention.head_size,
        itemsize=attention.itemsize,
    )

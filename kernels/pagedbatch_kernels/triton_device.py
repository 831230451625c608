"""The limits of a torch device that `launch` needs."""

from __future__ import annotations

import re
from functools import lru_cache

import torch

from pagedbatch_kernels.launch import DeviceLimits

#: For Triton's interpreter, which runs on the CPU: the tiles of a mid-sized GPU.
INTERPRETER = DeviceLimits("cuda", 86, 99 * 1024, 4)


@lru_cache
def device_limits(device: torch.device) -> DeviceLimits:
    """The limits of a GPU; for the CPU, `INTERPRETER`."""
    if device.type != "cuda":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        match = re.match(r"gfx(\d+)", properties.gcnArchName)
        capability = int(match[1]) if match else 0
        return DeviceLimits("hip", capability, properties.shared_memory_per_block, properties.multi_processor_count)
    return DeviceLimits(
        "cuda",
        properties.major * 10 + properties.minor,
        getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block),
        properties.multi_processor_count,
    )

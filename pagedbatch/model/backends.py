"""Which kernel backend serves a device. Knows their names, not their insides."""

from __future__ import annotations

from typing import cast

import torch
from pagedbatch_kernels import reference
from pagedbatch_kernels.interface import Backend

from pagedbatch.errors import UsageError

#: What `--attention` takes.
BACKENDS = ("auto", "torch")


def choose_backend(name: str, device: torch.device) -> tuple[str, Backend]:
    """The backend called `name`, or the best one for `device` when it is "auto".

    Raises:
        UsageError: there is no such backend.
    """
    if name in ("auto", "torch"):
        return "torch", cast(Backend, reference)
    raise UsageError(f"--attention {name}: no such backend for {device.type}; choose one of {', '.join(BACKENDS)}")

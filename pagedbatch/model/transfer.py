"""Copies to the device that the host doesn't wait for, and a step's results to the host in one copy.

Work on the device is written as a `DeviceTask`: a generator that launches everything, yields the tensors that it needs
on the host, is sent them as lists, and returns its results. `run_device_tasks` starts all tasks before it waits for the
device.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import chain
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")
DeviceTask: TypeAlias = Generator[list[Tensor], list[Any], T]


def to_device(values: Sequence[Any] | np.ndarray, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`values` as a tensor on `device`. A GPU fetches them when it gets there; the host goes on at once.

    The GPU gets there late, after the forwards that were launched before: steps that only prefill never make the host
    wait. So what it reads is pinned memory that belongs to this copy alone: torch records an event with the copy, and
    gives that memory out again only after it. A buffer of our own, written anew each step, would need such events too.
    """
    tensor = torch.as_tensor(values, dtype=dtype)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def to_device_packed(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """The int64 arrays, each flat, as tensors on `device`. A GPU gets all of them in one copy, as `send` says."""
    if device.type == "cpu":
        return [torch.from_numpy(array.reshape(-1)) for array in arrays]
    sizes = [array.size for array in arrays]
    staged = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=True)
    np.concatenate([array.reshape(-1) for array in arrays], out=staged.numpy())
    return list(torch.split(staged.to(device, non_blocking=True), sizes))


def to_host(tensors: Sequence[Tensor]) -> list[Any]:
    """The tensors as (nested) lists. On a GPU this is the one place where the host waits for the device.

    All travel together as float64, which holds float32, booleans and token ids exactly.
    """
    if not tensors:
        return []
    joined = torch.cat([tensor.reshape(-1).to(torch.float64) for tensor in tensors]).cpu()
    parts = joined.split([tensor.numel() for tensor in tensors])  # type: ignore[no-untyped-call]
    return [part.to(tensor.dtype).view(tensor.shape).tolist() for part, tensor in zip(parts, tensors, strict=True)]


def run_device_tasks(passes: Sequence[DeviceTask[T]]) -> list[T]:
    """Starts every pass, brings what they want home in one copy, and lets them finish in order."""
    wanted = [next(one) for one in passes]
    home = iter(to_host(list(chain.from_iterable(wanted))))
    results: list[T] = []
    for one, tensors in zip(passes, wanted, strict=True):
        try:
            one.send([next(home) for _ in tensors])
        except StopIteration as finished:
            results.append(finished.value)
    return results

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
    """`values` as a tensor on `device`. The host does not wait until a GPU has copied them.

    The GPU may copy them much later, after the forwards launched before: steps that only prefill never make the host
    wait. So it reads from pinned memory that belongs to this copy alone. torch records an event with the copy, and
    reuses the memory only after it; a buffer of our own that every step overwrites would need such events too.
    """
    tensor = torch.as_tensor(values, dtype=dtype)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def to_device_packed(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """The int64 arrays, flattened, as tensors on `device`: `to_device` with one copy for all."""
    if device.type == "cpu":
        return [torch.from_numpy(array.reshape(-1)) for array in arrays]
    sizes = [array.size for array in arrays]
    staged = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=True)
    np.concatenate([array.reshape(-1) for array in arrays], out=staged.numpy())
    return list(torch.split(staged.to(device, non_blocking=True), sizes))


def to_host(tensors: Sequence[Tensor]) -> list[Any]:
    """The tensors as (nested) lists. With a GPU, this is the one place where the host waits for the device.

    They are copied together as float64, which holds float32, booleans and token ids exactly.
    """
    if not tensors:
        return []
    joined = torch.cat([tensor.reshape(-1).to(torch.float64) for tensor in tensors]).cpu()
    parts = joined.split([tensor.numel() for tensor in tensors])  # type: ignore[no-untyped-call]
    return [part.to(tensor.dtype).view(tensor.shape).tolist() for part, tensor in zip(parts, tensors, strict=True)]


def run_device_tasks(tasks: Sequence[DeviceTask[T]]) -> list[T]:
    """Starts every task, copies the tensors of all to the host at once, and lets the tasks finish in order."""
    yielded = [next(task) for task in tasks]
    on_host = iter(to_host(list(chain.from_iterable(yielded))))
    results: list[T] = []
    for task, tensors in zip(tasks, yielded, strict=True):
        try:
            task.send([next(on_host) for _ in tensors])
        except StopIteration as finished:
            results.append(finished.value)
    return results

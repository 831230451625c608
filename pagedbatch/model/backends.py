"""Chooses the attention backend and the sampling ops of a device, and falls back to torch when a kernel fails."""

from __future__ import annotations

import importlib.util
import logging
from typing import Any, cast

import torch
from pagedbatch_kernels import reference
from pagedbatch_kernels.cpu import build as cpu_build
from pagedbatch_kernels.interface import AttentionBatch, AttentionShape, Backend, CacheShape
from pagedbatch_kernels.prefix_groups import PrefixCosts
from pagedbatch_kernels.sampling import SamplingOps
from torch import Tensor

from pagedbatch.errors import UsageError
from pagedbatch.model.torch_sampling import TorchSamplingOps
from pagedbatch.wording import first_line

_log = logging.getLogger(__name__)

REFERENCE = cast(Backend, reference)


def available_backends() -> list[str]:
    """Names of the backends that can run here, best first. Builds nothing."""
    triton = ["triton"] if _triton_can_launch() else []
    return [*triton, "cpu", "torch"] if cpu_build.can_load() else [*triton, "torch"]


def choose_backend(name: str, device: torch.device) -> tuple[str, Backend]:
    """The backend called `name`; "auto" is the best one for `device`.


    Raises:
        UsageError: that backend can't run here.
    """
    if name == "auto" and device.type == "cpu":
        try:
            return "cpu", _cpu_backend()
        except cpu_build.BuildError as error:
            _log.warning("no CPU kernels: %s: going on with the torch backend", error)
            return "torch", REFERENCE
    if name == "auto":
        name = "triton" if _triton_can_launch() else "torch"
    if name == "torch":
        return name, REFERENCE
    if name == "triton":
        if not _triton_can_launch():
            raise UsageError(
                f"--attention triton: {_why_no_triton()}; use --attention torch (or set TRITON_INTERPRET=1 to run "
                "the kernels, slowly, in Triton's interpreter)"
            )
        from pagedbatch_kernels import triton_backend

        return name, FallbackBackend(name, cast(Backend, triton_backend))
    if name == "cpu":
        if device.type != "cpu":
            raise UsageError(f"--attention cpu: the model runs on {device.type}; use --device cpu, or --attention auto")
        try:
            return name, _cpu_backend()
        except cpu_build.BuildError as error:
            raise UsageError(f"--attention cpu: {error}; use --attention torch") from error
    raise UsageError(f"--attention {name}: no such backend here; choose one of auto, {', '.join(available_backends())}")


def choose_sampling_ops(attention: str, backend_name: str, device: torch.device) -> SamplingOps:
    """On a CPU those of the C++ library, whatever the attention backend; otherwise those in torch.

    Args:
        attention, backend_name: the argument and the result of `choose_backend`.
    """
    has_failed = (attention, backend_name) == ("auto", "torch")  # and the user was told
    if device.type != "cpu" or has_failed:
        return TorchSamplingOps()
    from pagedbatch_kernels.cpu.sampling import CpuSamplingOps

    try:
        return CpuSamplingOps()
    except cpu_build.BuildError as error:
        _log.warning("no CPU sampling kernel: %s: going on with torch", error)
        return TorchSamplingOps()


class FallbackBackend:
    """A backend that the torch backend replaces from the first kernel on that fails.

    Both have the same cache layout, so that a run can switch at any step. A failed call is made again: every function
    overwrites what it writes.
    """

    def __init__(self, name: str, primary: Backend) -> None:
        self._name = name
        self._current = primary

    def allocate_cache(
        self,
        shape: CacheShape,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        is_spare: bool = False,
    ) -> Tensor:
        return self._current.allocate_cache(shape, num_blocks, dtype, device, is_spare=is_spare)

    def prefix_costs(self, attention: AttentionShape, device: torch.device) -> PrefixCosts | None:
        return self._current.prefix_costs(attention, device)

    def write_kv(self, key: Tensor, value: Tensor, layer_cache: Tensor, slot_mapping: Tensor) -> None:
        self._call("write_kv", key, value, layer_cache, slot_mapping)

    def paged_attention(self, query: Tensor, layer_cache: Tensor, batch: AttentionBatch, **options: Any) -> Tensor:
        output: Tensor = self._call("paged_attention", query, layer_cache, batch, **options)
        return output

    def copy_blocks(self, cache: Tensor, src: Tensor, dst: Tensor) -> None:
        self._call("copy_blocks", cache, src, dst)

    def swap_blocks(self, src_cache: Tensor, dst_cache: Tensor, src: Tensor, dst: Tensor) -> None:
        self._call("swap_blocks", src_cache, dst_cache, src, dst)

    def _call(self, function: str, *args: Any, **options: Any) -> Any:
        try:
            return getattr(self._current, function)(*args, **options)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:
            if self._current is REFERENCE:
                raise
            _log.warning(
                "%s kernel %s failed (%s): going on with the torch backend", self._name, function, first_line(error)
            )
            self._current = REFERENCE
            return getattr(REFERENCE, function)(*args, **options)


def _cpu_backend() -> Backend:
    """
    Raises:
        BuildError: its library can't be built.
    """
    from pagedbatch_kernels.cpu.backend import CpuBackend

    return CpuBackend()


def _triton_can_launch() -> bool:
    """Whether Triton is installed and has a device, or its interpreter, to run kernels on."""
    return _why_no_triton() is None


def _why_no_triton() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    from triton import knobs

    if torch.cuda.is_available() or knobs.runtime.interpret:
        return None
    return "there is no GPU that triton could compile for"

"""`SamplingOps` for a CPU, by the library that `build` makes: reads bfloat16 as it is, one thread a position."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from pagedbatch_kernels.cpu.build import load_library
from pagedbatch_kernels.sampling import Draws

#: Bounds what controls, which need scores in float32, take of memory; threads have enough to share among them.
_LOGITS_AT_ONCE = 2**23
#: A divisor below this may make infinities of scores in float32, and all that is this small is greedy.
_LEAST_TEMPERATURE = 1e-20


class Draw(ctypes.Structure):
    """The arguments of `draw`: `pagedbatch::Draw` of sampling.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("scores", "temperatures", "top_k", "top_p", "min_p")),
        *((name, ctypes.c_void_p) for name in ("starts", "points", "token_ids")),
        *((name, ctypes.c_int64) for name in ("num_rows", "size", "stride")),
        *((name, ctypes.c_int32) for name in ("is_bfloat16", "num_threads")),
    )


class Ranking(ctypes.Structure):
    """The arguments of `rank`: `pagedbatch::Ranking` of ranking.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("scores", "normalisers", "standing", "sums", "places")),
        *((name, ctypes.c_int64) for name in ("num_groups", "width", "size", "stride", "count")),
        *((name, ctypes.c_int32) for name in ("is_bfloat16", "num_threads")),
    )


class CpuSamplingOps:
    """The functions of one loaded library. Rows may lie apart, their entries not.

    Args:
        notice: takes one line when the library has to be built first.

    Raises:
        BuildError: there is none and it can't be built.
    """

    dtypes = (torch.float32, torch.bfloat16)

    def __init__(self, notice: Callable[[str], None]) -> None:
        library = load_library(notice)
        self._logsumexp = library.pagedbatch_log_normalisers
        self._logsumexp.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int64] * 3 + [ctypes.c_int32] * 2
        self._logsumexp.restype = None
        self._draw = library.pagedbatch_draw
        self._draw.argtypes, self._draw.restype = [ctypes.POINTER(Draw)], None
        self._joint_topk = library.pagedbatch_rank
        self._joint_topk.argtypes, self._joint_topk.restype = [ctypes.POINTER(Ranking)], None

    def max_batch_size(self, logits: Tensor) -> int:
        """See `SamplingOps.max_batch_size`."""
        return max(1, _LOGITS_AT_ONCE // logits.shape[1])

    def logsumexp(self, logits: Tensor) -> Tensor:
        """See `SamplingOps.logsumexp`.

        Raises:
            ValueError: no rows that it can read.
        """
        _check_rows(logits)
        normalisers = torch.empty(len(logits), dtype=torch.float32)
        self._logsumexp(
            logits.data_ptr(),
            normalisers.data_ptr(),
            *logits.shape,
            logits.stride(0),
            logits.dtype == torch.bfloat16,
            torch.get_num_threads(),
        )
        return normalisers

    def draw(self, scores: Tensor, draws: Draws) -> Tensor:
        """See `SamplingOps.draw`.

        Raises:
            ValueError: no rows that it can read, or `draws` of another number of rows or points.
        """
        _check_rows(scores)
        num_rows, vocab_size = scores.shape
        starts = np.concatenate([[0], np.cumsum(draws.counts)])
        lengths = {len(each) for each in (draws.temperatures, draws.top_k, draws.top_p, draws.min_p, draws.counts)}
        if lengths != {num_rows} or len(draws.uniforms) != starts[-1]:
            raise ValueError(f"draws for {sorted(lengths)} rows and {len(draws.uniforms)} points, {num_rows} rows")
        # Named, so that they live until the call is over.
        temperatures = _array([t and max(t, _LEAST_TEMPERATURE) for t in draws.temperatures], np.float32)
        top_k, top_p = _array(draws.top_k, np.int64), _array(draws.top_p, np.float64)
        min_p, starts = _array(draws.min_p, np.float32), _array(starts, np.int64)
        points = _array(draws.uniforms, np.float64)
        token_ids = torch.empty(len(points), dtype=torch.int64)
        self._draw(
            ctypes.byref(
                Draw(
                    scores=scores.data_ptr(),
                    temperatures=temperatures.ctypes.data,
                    top_k=top_k.ctypes.data,
                    top_p=top_p.ctypes.data,
                    min_p=min_p.ctypes.data,
                    starts=starts.ctypes.data,
                    points=points.ctypes.data,
                    token_ids=token_ids.data_ptr(),
                    num_rows=num_rows,
                    size=vocab_size,
                    stride=scores.stride(0),
                    is_bfloat16=scores.dtype == torch.bfloat16,
                    num_threads=torch.get_num_threads(),
                )
            )
        )
        return token_ids

    def joint_topk(
        self, scores: Tensor, normalisers: Tensor, standing: Tensor, width: int, count: int
    ) -> tuple[Tensor, Tensor]:
        """See `SamplingOps.joint_topk`. Of equals, the first are in the list, and come first.

        Raises:
            ValueError: no rows that it can read, or the numbers don't fit each other.
        """
        _check_rows(scores)
        num_rows, vocab_size = scores.shape
        if num_rows % width or not 0 <= count <= width * vocab_size < 2**32:
            raise ValueError(f"the {count} largest of each {width} of {num_rows} rows of {vocab_size}")
        for each in (normalisers, standing):
            if each.shape != (num_rows,) or each.dtype != torch.float32 or not each.is_contiguous():
                raise ValueError(f"{each.dtype} {list(each.shape)} for {num_rows} rows")
        sums = torch.empty((num_rows // width, count), dtype=torch.float32)
        places = torch.empty(sums.shape, dtype=torch.int64)
        if count:
            self._joint_topk(
                ctypes.byref(
                    Ranking(
                        scores=scores.data_ptr(),
                        normalisers=normalisers.data_ptr(),
                        standing=standing.data_ptr(),
                        sums=sums.data_ptr(),
                        places=places.data_ptr(),
                        num_groups=num_rows // width,
                        width=width,
                        size=vocab_size,
                        stride=scores.stride(0),
                        count=count,
                        is_bfloat16=scores.dtype == torch.bfloat16,
                        num_threads=torch.get_num_threads(),
                    )
                )
            )
        return sums, places


def _array(values: Sequence[float] | np.ndarray, dtype: type[np.generic]) -> np.ndarray:
    return np.ascontiguousarray(values, dtype)


def _check_rows(rows: Tensor) -> None:
    """
    Raises:
        ValueError: it is another kind of tensor.
    """
    if rows.dtype not in CpuSamplingOps.dtypes or rows.dim() != 2 or rows.device.type != "cpu" or rows.shape[1] == 0:
        raise ValueError(f"expected rows of float32 or bfloat16 on the CPU, got {rows.dtype} {list(rows.shape)}")
    if rows.stride(1) != 1:
        raise ValueError("entries of a row don't follow each other")

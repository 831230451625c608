"""`SamplingOps` for a CPU: sampling.cpp and topk.cpp."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pagedbatch_kernels.cpu.library import JointTopkArgs, SampleArgs, load_kernels, pointer
from pagedbatch_kernels.sampling import Draws

#: Bounds the memory of logits processors, which need float32, and still keeps all threads busy.
_MAX_LOGITS = 2**23
#: Dividing by less could overflow float32; temperatures this small are greedy anyway.
_MIN_TEMPERATURE = 1e-20


class CpuSamplingOps:
    """Logits may have any stride between positions, but must be contiguous in each.


    Raises:
        BuildError: it can't be built or loaded.
    """

    dtypes = (torch.float32, torch.bfloat16)

    def __init__(self) -> None:
        self._library = load_kernels()

    def max_batch_size(self, logits: Tensor) -> int:
        """See `SamplingOps.max_batch_size`."""
        return max(1, _MAX_LOGITS // logits.shape[1])

    def logsumexp(self, logits: Tensor) -> Tensor:
        """See `SamplingOps.logsumexp`.

        Raises:
            ValueError: logits of another kind.
        """
        _check_logits(logits)
        output = torch.empty(len(logits), dtype=torch.float32)
        self._library.pagedbatch_logsumexp(
            logits.data_ptr(),
            output.data_ptr(),
            *logits.shape,
            logits.stride(0),
            logits.dtype == torch.bfloat16,
            torch.get_num_threads(),
        )
        return output

    def draw(self, logits: Tensor, draws: Draws) -> Tensor:
        """See `SamplingOps.draw`.

        Raises:
            ValueError: logits of another kind, or `draws` for another number of positions or uniforms.
        """
        return self._sample(logits, draws, None)

    def truncated_probs(self, logits: Tensor, draws: Draws) -> Tensor:
        """See `SamplingOps.truncated_probs`.

        Raises:
            ValueError: as in `draw`.
        """
        probs = torch.empty(logits.shape, dtype=torch.float32)
        self._sample(logits, draws, probs)
        return probs

    def _sample(self, logits: Tensor, draws: Draws, probs: Tensor | None) -> Tensor:
        """Token ids of the draws; `probs` is filled if given."""
        _check_logits(logits)
        batch_size, vocab_size = logits.shape
        starts = np.concatenate([[0], np.cumsum(draws.counts)])
        lengths = {len(each) for each in (draws.temperatures, draws.top_k, draws.top_p, draws.min_p, draws.counts)}
        if lengths != {batch_size} or len(draws.uniforms) != starts[-1]:
            raise ValueError(
                f"draws for {sorted(lengths)} positions with {len(draws.uniforms)} uniforms, {batch_size} positions"
            )
        # In local variables, so that they live until the call returns.
        temperatures = _array([t and max(t, _MIN_TEMPERATURE) for t in draws.temperatures], np.float32)
        top_k, top_p = _array(draws.top_k, np.int64), _array(draws.top_p, np.float64)
        min_p, starts = _array(draws.min_p, np.float32), _array(starts, np.int64)
        uniforms = _array(draws.uniforms, np.float64)
        token_ids = torch.empty(len(uniforms), dtype=torch.int64)
        args = SampleArgs(
            logits=logits.data_ptr(),
            temperatures=temperatures.ctypes.data,
            top_k=top_k.ctypes.data,
            top_p=top_p.ctypes.data,
            min_p=min_p.ctypes.data,
            starts=starts.ctypes.data,
            uniforms=uniforms.ctypes.data,
            token_ids=token_ids.data_ptr(),
            probs=None if probs is None else probs.data_ptr(),
            batch_size=batch_size,
            vocab_size=vocab_size,
            stride=logits.stride(0),
            is_bfloat16=logits.dtype == torch.bfloat16,
            num_threads=torch.get_num_threads(),
        )
        self._library.pagedbatch_sample(args)
        return token_ids

    def joint_topk(
        self, logits: Tensor, logsumexp: Tensor, cum_logprobs: Tensor, group_size: int, k: int
    ) -> tuple[Tensor, Tensor]:
        """See `SamplingOps.joint_topk`. Ties go to the lower index.

        Raises:
            ValueError: logits of another kind, or numbers that don't fit each other.
        """
        _check_logits(logits)
        batch_size, vocab_size = logits.shape
        if batch_size % group_size or not 0 <= k <= group_size * vocab_size < 2**32:
            raise ValueError(f"top {k} of groups of {group_size}, for {batch_size} positions of {vocab_size} logits")
        scores = torch.empty((batch_size // group_size, k), dtype=torch.float32)
        indices = torch.empty(scores.shape, dtype=torch.int64)
        args = JointTopkArgs(
            logits=logits.data_ptr(),
            logsumexp=pointer(logsumexp, torch.float32, (batch_size,)),
            cum_logprobs=pointer(cum_logprobs, torch.float32, (batch_size,)),
            scores=scores.data_ptr(),
            indices=indices.data_ptr(),
            num_groups=batch_size // group_size,
            group_size=group_size,
            vocab_size=vocab_size,
            stride=logits.stride(0),
            k=k,
            is_bfloat16=logits.dtype == torch.bfloat16,
            num_threads=torch.get_num_threads(),
        )
        if k:
            self._library.pagedbatch_joint_topk(args)
        return scores, indices


def _array(values: Sequence[float] | np.ndarray, dtype: type[np.generic]) -> np.ndarray:
    return np.ascontiguousarray(values, dtype)


def _check_logits(logits: Tensor) -> None:
    """
    Raises:
        ValueError: logits of another kind.
    """
    is_right = logits.dtype in CpuSamplingOps.dtypes and logits.device.type == "cpu"
    if not is_right or logits.dim() != 2 or logits.shape[1] == 0 or logits.stride(1) != 1:
        raise ValueError(
            "expected float32 or bfloat16 logits [batch_size, vocab_size] on the CPU, contiguous in each position, "
            f"got {logits.dtype} {list(logits.shape)} with strides {list(logits.stride())}"
        )

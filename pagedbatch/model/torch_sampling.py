"""`SamplingOps` in torch: for GPUs, where nothing here waits for the device, and for CPUs without the C++ library."""

from __future__ import annotations

import numpy as np
import torch
from pagedbatch_kernels.sampling import Draws
from torch import Tensor

from pagedbatch.model.top_k_top_p import apply_top_k_top_p_
from pagedbatch.model.transfer import to_device

#: Bounds the memory that a step needs.
_MAX_LOGITS_ON_CPU, _MAX_LOGITS = 2**23, 2**27
#: Dividing by less could overflow float32; temperatures this small are greedy anyway.
_MIN_TEMPERATURE = 1e-20
_SPAN = 256


class TorchSamplingOps:
    """See `SamplingOps` for what each function does."""

    dtypes = (torch.float32,)

    def max_batch_size(self, logits: Tensor) -> int:
        max_logits = _MAX_LOGITS_ON_CPU if logits.device.type == "cpu" else _MAX_LOGITS
        return max(1, max_logits // logits.shape[1])

    def logsumexp(self, logits: Tensor) -> Tensor:
        """By way of softmax: how torch's own logsumexp rounds on a CPU depends on the number of positions."""
        return logits.amax(dim=-1) - logits.softmax(dim=-1).amax(dim=-1).log()

    def draw(self, logits: Tensor, draws: Draws) -> Tensor:
        device = logits.device
        token_ids = logits.argmax(dim=-1)[to_device(draws.batch_indices, torch.int64, device)]  # the first among ties
        positions = np.flatnonzero(np.array(draws.temperatures) > 0)
        if len(positions):
            own = logits if len(positions) == len(logits) else logits[to_device(positions, torch.int64, device)]
            random = draws.at(positions)
            indices = np.flatnonzero(np.isin(draws.batch_indices, positions))
            token_ids[to_device(indices, torch.int64, device)] = invert_cdf(
                self.truncated_probs(own, random),
                to_device(random.batch_indices, torch.int64, device),
                to_device(random.uniforms, torch.float64, device),
            )
        return token_ids

    def truncated_probs(self, logits: Tensor, draws: Draws) -> Tensor:
        temperatures = [max(temperature, _MIN_TEMPERATURE) for temperature in draws.temperatures]
        probs = (logits / to_device(temperatures, torch.float32, logits.device).unsqueeze(1)).softmax(dim=-1)
        return apply_top_k_top_p_(probs, draws.top_k, draws.top_p, draws.min_p)

    def joint_topk(
        self, logits: Tensor, logsumexp: Tensor, cum_logprobs: Tensor, group_size: int, k: int
    ) -> tuple[Tensor, Tensor]:
        if group_size == 1:  # the order is that of the logits
            top = logits.topk(k)
            return top.values - logsumexp.unsqueeze(1) + cum_logprobs.unsqueeze(1), top.indices
        scores = logits - logsumexp.unsqueeze(1) + cum_logprobs.unsqueeze(1)
        top = scores.view(-1, group_size * logits.shape[1]).topk(k)
        return top.values, top.indices


def invert_cdf(probs: Tensor, batch_indices: Tensor, uniforms: Tensor) -> Tensor:
    """For each draw, the first token at which the cumulative probability exceeds `uniform * total`.

    Summed in vocabulary order, spans first and then within one span, so that the vocabulary is read once and no draw
    needs memory of its size.

    Args:
        probs: float32 [batch_size, vocab_size], not negative, some positive at each position; need not sum to 1.
        batch_indices: int64 [num_draws], the position of each draw.
        uniforms: float64 [num_draws] in [0, 1).

    Returns:
        int64 [num_draws], token ids of positive probability.
    """
    spans = torch.nn.functional.pad(probs, (0, -probs.shape[1] % _SPAN)).view(len(probs), -1, _SPAN)
    span_ends = spans.sum(dim=-1).cumsum(dim=-1, dtype=torch.float64)[batch_indices]
    # Below the total even for the largest uniform, 1 - 2**-53: that product never rounds up to it.
    targets = uniforms.unsqueeze(1) * span_ends[:, -1:]
    # right=True skips tokens of probability 0: the first cumulative sum strictly above the target.
    span_indices = torch.searchsorted(span_ends, targets, right=True)
    before = torch.where(span_indices > 0, span_ends.gather(1, (span_indices - 1).clamp(min=0)), 0.0)
    within = spans[batch_indices, span_indices.squeeze(1)].double()
    ends = before + within.cumsum(dim=-1)
    offset = torch.searchsorted(ends, targets, right=True)
    # The span's own sum may be rounded up a little above `ends`: then its last possible token is meant.
    ids = torch.arange(_SPAN, device=probs.device)
    last = torch.where(within > 0, ids, -1).amax(dim=-1, keepdim=True)
    return (span_indices * _SPAN + torch.minimum(offset, last)).squeeze(1)

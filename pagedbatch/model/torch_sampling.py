"""`SamplingOps` in torch: for GPUs, the oracle of the CPU's own, and what stands in for it. Knows no task.

On a GPU nothing here waits for the device.
"""

from __future__ import annotations

import numpy as np
import torch
from pagedbatch_kernels.sampling import Draws
from torch import Tensor

from pagedbatch.model.top_k_top_p import apply_top_k_top_p_
from pagedbatch.model.topk import first_largest, largest
from pagedbatch.model.transfer import to_device

#: Logits worked on at once. On a CPU they stay in its caches, where a pass costs a fraction; on a GPU this only bounds
#: the memory that a step needs.
_LOGITS_AT_ONCE_ON_CPU, _LOGITS_AT_ONCE = 2**20, 2**27
#: A divisor below this may make infinities of scores in float32, and all that is this small is greedy.
_LEAST_TEMPERATURE = 1e-20
_SPAN = 256


class TorchSamplingOps:
    """See `SamplingOps` for what each function does."""

    dtypes = (torch.float32,)

    def max_batch_size(self, logits: Tensor) -> int:
        at_once = _LOGITS_AT_ONCE_ON_CPU if logits.device.type == "cpu" else _LOGITS_AT_ONCE
        return max(1, at_once // logits.shape[1])

    def logsumexp(self, logits: Tensor) -> Tensor:
        """By way of softmax, which torch does several times as fast as logsumexp on a CPU."""
        return logits.amax(dim=-1) - logits.softmax(dim=-1).amax(dim=-1).log()

    def draw(self, scores: Tensor, draws: Draws) -> Tensor:
        device = scores.device
        is_random = np.array([temperature > 0 for temperature in draws.temperatures])
        row_of_draw = draws.batch_indices
        drawn = torch.empty(len(row_of_draw), dtype=torch.int64, device=device)
        for kind in (False, True):
            rows = np.flatnonzero(is_random == kind)
            if len(rows) == 0:
                continue
            own_draws = np.flatnonzero(is_random[row_of_draw] == kind)
            own = scores if len(rows) == len(is_random) else scores[to_device(rows, torch.int64, device)]
            row_of_own = to_device(np.searchsorted(rows, row_of_draw[own_draws]), torch.int64, device)
            if kind:
                weights = truncated_probs(own, draws, rows)
                picked = invert_cdf(weights, row_of_own, to_device(draws.uniforms[own_draws], torch.float64, device))
            else:
                picked = first_largest(own)[row_of_own]
            drawn[to_device(own_draws, torch.int64, device)] = picked
        return drawn

    def joint_topk(
        self, logits: Tensor, logsumexp: Tensor, cum_logprobs: Tensor, group_size: int, k: int
    ) -> tuple[Tensor, Tensor]:
        if group_size == 1:  # what is the same for a whole position changes nothing in its order
            values, token_ids = largest(logits, k)
            return values - logsumexp.unsqueeze(1) + cum_logprobs.unsqueeze(1), token_ids
        scores = logits - logsumexp.unsqueeze(1) + cum_logprobs.unsqueeze(1)
        return largest(scores.view(-1, group_size * logits.shape[1]), k)


def truncated_probs(
    scores: Tensor, draws: Draws, rows: np.ndarray, drawn: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """What each token weighs in the draws of some rows: its probability at the temperature, 0 if it is left out.

    Args:
        scores: float32 [num_rows, vocab_size].
        draws: of which the entries `rows` are those of `scores`; all at temperatures above 0.
        drawn: rows of `scores` and token ids, int64 [num_draws], that stay whatever is left out: other `SamplingOps`,
            which drew them, may have found inside a border what rounding puts just outside it here.

    Returns:
        float32 [num_rows, vocab_size], not normalised.
    """
    temperatures = [max(draws.temperatures[row], _LEAST_TEMPERATURE) for row in rows]
    if any(temperature != 1.0 for temperature in temperatures):
        scores = scores / to_device(temperatures, torch.float32, scores.device).unsqueeze(1)
    weights = scores.softmax(dim=-1)
    probabilities = torch.empty(0) if drawn is None else weights[drawn]
    settings = ([each[row] for row in rows] for each in (draws.top_k, draws.top_p, draws.min_p))
    apply_top_k_top_p_(weights, *settings)
    if drawn is not None:
        weights[drawn] = probabilities
    return weights


def invert_cdf(weights: Tensor, rows: Tensor, points: Tensor) -> Tensor:
    """For each draw, the token at which the running sum of its row's weights passes `point * total`.

    Summed in vocabulary order, over spans first and then within one span: the vocabulary is read once and never sorted.
    Vocabulary order keeps a draw stable when two weights are nearly equal.

    Args:
        weights: float32 [num_rows, vocab_size], not negative, some positive in each row.
        rows: int64 [num_draws], the row of each draw.
        points: float64 [num_draws] in [0, 1).

    Returns:
        int64 [num_draws], token ids of positive weight.
    """
    padding = -weights.shape[1] % _SPAN
    padded = torch.nn.functional.pad(weights, (0, padding)) if padding else weights
    spans = padded.view(weights.shape[0], -1, _SPAN)
    span_ends = spans.sum(dim=-1).cumsum(dim=-1, dtype=torch.float64)[rows]
    # Below the total even for the largest point, 1 - 2**-53: that product never rounds up to it.
    targets = points.unsqueeze(1) * span_ends[:, -1:]
    # right=True skips what has no weight: the first running sum strictly above the target.
    chosen = torch.searchsorted(span_ends, targets, right=True)
    before = torch.where(chosen > 0, span_ends.gather(1, (chosen - 1).clamp(min=0)), 0.0)
    within = spans[rows, chosen.squeeze(1)].double()
    ends = before + within.cumsum(dim=-1)
    offset = torch.searchsorted(ends, targets, right=True)
    # The span's own sum may be rounded up a little above `ends`: then its last token with weight is meant.
    position = torch.arange(_SPAN, device=weights.device)
    last = torch.where(within > 0, position, -1).amax(dim=-1, keepdim=True)
    return (chosen * _SPAN + torch.minimum(offset, last)).squeeze(1)

"""What a device offers for sampling, top-k and logprobs: `SamplingOps`, and `Draws`, the parameters of sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Draws:
    """What to draw from a batch of logits. Every field but `uniforms` has one entry per position.

    Truncation follows Hugging Face's warpers, in their order, on the probabilities at the temperature. Top-k keeps what
    is at least as likely as the k-th token. Top-p keeps a token while those before it hold less than `top_p` of what
    top-k kept, so that at least one stays; among ties the lower id comes first (Holtzman et al., arXiv 1904.09751).
    Min-p keeps what has at least `min_p` times the probability of the likeliest token. The drawn token is the first at
    which the cumulative probability, in vocabulary order, exceeds the uniform's share of the total.
    """

    temperatures: Sequence[float]  #: 0: the likeliest token, the first among ties, whatever the rest says
    top_k: Sequence[int]  #: 0 or less, or vocab_size and more: off
    top_p: Sequence[float]  #: 1.0: off
    min_p: Sequence[float]  #: 0.0: off
    counts: Sequence[int]  #: number of tokens to draw
    uniforms: np.ndarray  #: float64 [sum(counts)] in [0, 1), position by position

    @property
    def batch_indices(self) -> np.ndarray:
        """The position of each draw: int64 [sum(counts)]."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    def at(self, positions: np.ndarray) -> Draws:
        """The draws at some positions, int64 in ascending order."""
        return Draws(
            temperatures=[self.temperatures[i] for i in positions],
            top_k=[self.top_k[i] for i in positions],
            top_p=[self.top_p[i] for i in positions],
            min_p=[self.min_p[i] for i in positions],
            counts=[self.counts[i] for i in positions],
            uniforms=self.uniforms[np.isin(self.batch_indices, positions)],
        )


class SamplingOps(Protocol):
    """Functions of logits [batch_size, vocab_size]. A position's result does not depend on the rest of the batch."""

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Supported dtypes of logits."""
        ...

    def max_batch_size(self, logits: Tensor) -> int:
        """The number of positions, at least 1, up to which one call is fast and its memory bounded."""
        ...

    def logsumexp(self, logits: Tensor) -> Tensor:
        """float32 [batch_size]; not finite for a position that holds NaN or infinity, or nothing but -infinity."""
        ...

    def draw(self, logits: Tensor, draws: Draws) -> Tensor:
        """Token ids, int64 [num_draws]. Each position must hold a finite number, and otherwise only -infinity."""
        ...

    def truncated_probs(self, logits: Tensor, draws: Draws) -> Tensor:
        """What `draw` draws from: float32 [batch_size, vocab_size], not normalised, 0 for tokens that are left out.

        All temperatures must be above 0.
        """
        ...

    def joint_topk(
        self, logits: Tensor, logsumexp: Tensor, cum_logprobs: Tensor, group_size: int, k: int
    ) -> tuple[Tensor, Tensor]:
        """The `k` largest of `logits - logsumexp + cum_logprobs` in each group of `group_size` neighbouring positions.

        Args:
            logits: [num_groups * group_size, vocab_size].
            logsumexp, cum_logprobs: float32 [num_groups * group_size].
            k: at most `group_size * vocab_size`.

        Returns:
            The scores, float32, and their indices, int64 `position in the group * vocab_size + token id`; both
            [num_groups, k], best first. Which of several ties at the end are included is undefined, as is everything
            for a group with a logsumexp that is not finite.
        """
        ...

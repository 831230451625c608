"""What choosing tokens needs of a device: passes over rows of logits or scores. Knows no request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Draws:
    """What to draw from each row of scores. All but `uniforms` have an entry a row.

    Tokens are left out as Hugging Face's warpers do, in their order, by what is likely at the temperature. Top-k keeps
    what is at least as likely as the k-th token. Top-p keeps a token while those before it hold less than `top_p` of
    what top-k kept, so that at least one stays; among equals the lower id comes first (Holtzman et al., arXiv
    1904.09751). Min-p keeps what has at least `min_p` times the weight of the likeliest. A draw is then the token at
    which the running sum of the weights, in vocabulary order, passes its point's share of their total.
    """

    temperatures: Sequence[float]  #: 0: the likeliest token, the first of equals, whatever the rest says
    top_k: Sequence[int]  #: 0 or less, or vocab_size and more, keeps all
    top_p: Sequence[float]  #: 1.0 keeps all
    min_p: Sequence[float]  #: 0.0 keeps all
    counts: Sequence[int]  #: how many tokens to draw
    uniforms: np.ndarray  #: float64 [sum(counts)] in [0, 1), row by row

    @property
    def batch_indices(self) -> np.ndarray:
        """The row of each draw: int64 [sum(counts)]."""
        return np.repeat(np.arange(len(self.counts)), self.counts)


class SamplingOps(Protocol):
    """Each function takes rows of one dtype of `dtypes`. A row's result does not depend on the other rows."""

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """What it reads."""
        ...

    def max_batch_size(self, logits: Tensor) -> int:
        """How many rows of `logits` [num_rows, vocab_size] are best worked on at once; at least 1."""
        ...

    def logsumexp(self, logits: Tensor) -> Tensor:
        """The logsumexp of each row of `logits` [num_rows, vocab_size]: float32 [num_rows].

        Not finite where a row holds NaN or infinity, or nothing but minus infinity.
        """
        ...

    def draw(self, scores: Tensor, draws: Draws) -> Tensor:
        """Token ids, int64 [num_draws], from rows of `scores` [num_rows, vocab_size] that hold some finite number, and
        beside such only minus infinity."""
        ...

    def joint_topk(
        self, scores: Tensor, normalisers: Tensor, standing: Tensor, width: int, count: int
    ) -> tuple[Tensor, Tensor]:
        """The `count` largest of `score - normaliser + standing` of each `width` rows together.

        Args:
            scores: [num_groups * width, vocab_size].
            normalisers, standing: float32 [num_groups * width].
            count: at most `width * vocab_size`.

        Returns:
            The sums, float32, and their places, int64 `row of the group * vocab_size + token id`; both
            [num_groups, count], best first. Which of equals at the end are in the list is not defined; nor is
            anything where a normaliser is not finite.
        """
        ...

"""The inverse of a running sum: what has no weight is never drawn, and rounding never leads past the last token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedbatch.model.torch_sampling import invert_cdf

LAST_POINT = 1 - 2.0**-53


def inverted(weights: list[float], points: list[float]) -> list[int]:
    rows = torch.zeros(len(points), dtype=torch.int64)
    return invert_cdf(torch.tensor([weights]), rows, torch.tensor(points, dtype=torch.float64)).tolist()


def test_points_at_borders_belong_to_the_next_token() -> None:
    points = [0.0, 0.125, 0.25 - 2.0**-53, 0.25, 0.5 - 2.0**-53, 0.5, LAST_POINT]
    assert inverted([0.25, 0.25, 0.5], points) == [0, 0, 0, 1, 1, 2, 2]


def test_one_token() -> None:
    assert inverted([0.3], [0.0, 0.5, LAST_POINT]) == [0, 0, 0]


@pytest.mark.parametrize("size", [3, 255, 256, 257, 1000])
@pytest.mark.parametrize("place", [0, 1, -1, 128])
def test_tokens_without_weight_are_never_drawn(size: int, place: int) -> None:
    weights = torch.zeros(size)
    weights[place % size] = 0.7
    assert set(inverted(weights.tolist(), [0.0, 0.3, 0.999, LAST_POINT])) == {place % size}


def test_rounding_at_the_end_of_the_last_weights() -> None:
    """The total of many odd weights rounds; the spans behind the last of them are empty."""
    for seed in range(40):
        weights = torch.rand(1, 2000, generator=torch.Generator().manual_seed(seed))
        weights[:, 700 + seed :] = 0.0
        weights[:, ::3] = 0.0
        points = torch.tensor([0.0, *torch.rand(50).tolist(), LAST_POINT], dtype=torch.float64)
        drawn = invert_cdf(weights, torch.zeros(len(points), dtype=torch.int64), points)
        assert (weights[0, drawn] > 0).all()
        assert drawn[-1] == weights[0].nonzero().max()


def test_inversion_equals_a_running_sum() -> None:
    weights = (2 * torch.randn(5, 3000, generator=torch.Generator().manual_seed(0))).softmax(-1)
    rows = torch.arange(5).repeat_interleave(200)
    points = torch.from_numpy(np.random.default_rng(0).random(1000))
    running = weights.double().cumsum(-1)
    drawn = invert_cdf(weights, rows, points)
    ends, starts = running[rows, drawn], running[rows, drawn] - weights[rows, drawn]
    targets = points * running[rows, -1]
    assert ((starts - 1e-7 <= targets) & (targets < ends + 1e-7)).all()

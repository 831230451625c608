"""Sampling in torch: greedy, joint top-k, and the inverse CDF, which never draws what has no probability."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pagedbatch_kernels.sampling import Draws

from pagedbatch.model.torch_sampling import TorchSamplingOps, invert_cdf

LAST_UNIFORM = 1 - 2.0**-53


def inverted(probs: list[float], uniforms: list[float]) -> list[int]:
    batch_indices = torch.zeros(len(uniforms), dtype=torch.int64)
    return invert_cdf(torch.tensor([probs]), batch_indices, torch.tensor(uniforms, dtype=torch.float64)).tolist()


def test_points_at_borders_belong_to_the_next_token() -> None:
    uniforms = [0.0, 0.125, 0.25 - 2.0**-53, 0.25, 0.5 - 2.0**-53, 0.5, LAST_UNIFORM]
    assert inverted([0.25, 0.25, 0.5], uniforms) == [0, 0, 0, 1, 1, 2, 2]


def test_one_token() -> None:
    assert inverted([0.3], [0.0, 0.5, LAST_UNIFORM]) == [0, 0, 0]


@pytest.mark.parametrize("size", [3, 255, 256, 257, 1000])
@pytest.mark.parametrize("place", [0, 1, -1, 128])
def test_tokens_without_weight_are_never_drawn(size: int, place: int) -> None:
    probs = torch.zeros(size)
    probs[place % size] = 0.7
    assert set(inverted(probs.tolist(), [0.0, 0.3, 0.999, LAST_UNIFORM])) == {place % size}


def test_rounding_at_the_end_of_the_last_probs() -> None:
    """The total of many odd probs rounds; the spans behind the last of them are empty."""
    for seed in range(40):
        probs = torch.rand(1, 2000, generator=torch.Generator().manual_seed(seed))
        probs[:, 700 + seed :] = 0.0
        probs[:, ::3] = 0.0
        uniforms = torch.tensor([0.0, *torch.rand(50).tolist(), LAST_UNIFORM], dtype=torch.float64)
        drawn = invert_cdf(probs, torch.zeros(len(uniforms), dtype=torch.int64), uniforms)
        assert (probs[0, drawn] > 0).all()
        assert drawn[-1] == probs[0].nonzero().max()


def test_inversion_equals_a_running_sum() -> None:
    probs = (2 * torch.randn(5, 3000, generator=torch.Generator().manual_seed(0))).softmax(-1)
    batch_indices = torch.arange(5).repeat_interleave(200)
    uniforms = torch.from_numpy(np.random.default_rng(0).random(1000))
    running = probs.double().cumsum(-1)
    drawn = invert_cdf(probs, batch_indices, uniforms)
    ends, starts = running[batch_indices, drawn], running[batch_indices, drawn] - probs[batch_indices, drawn]
    targets = uniforms * running[batch_indices, -1]
    assert ((starts - 1e-7 <= targets) & (targets < ends + 1e-7)).all()


@pytest.mark.parametrize("size", [1, 5, 33, 300, 50257])
def test_greedy_takes_the_first_of_ties(size: int) -> None:
    logits = torch.randn(50, size, generator=torch.Generator().manual_seed(size)).round()
    zeros = [0.0] * 50
    draws = Draws(zeros, [0] * 50, [1.0] * 50, zeros, [1] * 50, np.zeros(50))
    assert TorchSamplingOps().draw(logits, draws).tolist() == [line.index(max(line)) for line in logits.tolist()]


@pytest.mark.parametrize("size", [5, 33, 5000])
@pytest.mark.parametrize("group_size", [1, 3])
def test_joint_topk_is_that_of_a_sort(size: int, group_size: int) -> None:
    ops, generator = TorchSamplingOps(), torch.Generator().manual_seed(size)
    logits = torch.randn(2 * group_size, size, generator=generator)
    logsumexp, cum_logprobs = ops.logsumexp(logits), -torch.rand(2 * group_size, generator=generator)
    everything = (logits - logsumexp.unsqueeze(1) + cum_logprobs.unsqueeze(1)).view(2, -1)
    expected, order = everything.sort(dim=-1, descending=True)
    for k in (0, 1, 2, 5):
        scores, indices = ops.joint_topk(logits, logsumexp, cum_logprobs, group_size, k)
        assert torch.equal(scores, expected[:, :k])
        assert torch.equal(indices, order[:, :k])


def test_joint_topk_of_ties_are_different_tokens() -> None:
    scores, indices = TorchSamplingOps().joint_topk(torch.zeros(2, 300), torch.zeros(2), torch.zeros(2), 1, 40)
    assert (scores == 0).all()
    assert all(len(set(ids)) == 40 and max(ids) < 300 for ids in indices.tolist())

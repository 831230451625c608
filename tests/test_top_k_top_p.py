"""Top-k, top-p and min-p against Hugging Face's warpers, in their order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from pagedbatch.model.top_k_top_p import apply_top_k_top_p_

SIZES = [1, 2, 5, 127, 128, 129, 300, 5000, 49152]
#: Spread of random logits: from nearly even odds to nearly one token.
SPREADS = [0.01, 1.0, 4.0, 20.0]
#: (top_k, top_p, min_p)
SETTINGS = [
    (0, 1.0, 0.0), (-1, 0.9, 0.0), (1, 1.0, 0.0), (3, 1.0, 0.0), (128, 1.0, 0.0), (200, 0.8, 0.0), (10**6, 0.3, 0.0),
    (0, 1e-9, 0.0), (0, 0.5, 0.0), (0, 0.95, 0.0), (0, 0.999, 0.0), (40, 0.9, 0.0), (0, 1.0, 0.1), (0, 1.0, 1.0),
    (50, 0.95, 0.05), (1000, 0.99, 0.001),
]  # fmt: skip


def random_logits(batch_size: int, size: int, spread: float) -> Tensor:
    """In float64, where Hugging Face's running sums do not round and no two tokens are equal."""
    return torch.randn(batch_size, size, generator=torch.Generator().manual_seed(size), dtype=torch.float64) * spread


def kept_by_hf(logits: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    scores, ids = logits, torch.empty(0)
    if top_k > 0:
        scores = TopKLogitsWarper(top_k)(ids, scores)
    if top_p < 1.0:
        scores = TopPLogitsWarper(top_p)(ids, scores)
    if min_p > 0:
        scores = MinPLogitsWarper(min_p)(ids, scores)
    return scores > -torch.inf


def truncated(probs: Tensor, *settings: tuple[int, float, float]) -> Tensor:
    top_k, top_p, min_p = (list(values) for values in zip(*settings, strict=True))
    return apply_top_k_top_p_(probs.clone(), top_k, top_p, min_p)


@pytest.mark.parametrize("size", SIZES)
def test_equals_hf(size: int) -> None:
    """Every setting in one batch, each position with another spread."""
    cases = [(spread, setting) for spread in SPREADS for setting in SETTINGS]
    if size > 10_000:
        cases = cases[::3]
    logits = torch.cat([random_logits(1, size, spread) for spread, _ in cases])
    probs = logits.softmax(-1).float()
    found = truncated(probs, *[setting for _, setting in cases])
    for i, (spread, setting) in enumerate(cases):
        # The probs that were rounded to float32 are what counts, for both.
        expected = kept_by_hf(probs[i : i + 1].double().log(), *setting)[0]
        wrong = (found[i] > 0) != (expected & (probs[i] > 0))
        assert not wrong.any(), f"spread {spread}, {setting}: {int(wrong.sum())} of {int(expected.sum())}"
        assert torch.equal(found[i][expected], probs[i][expected])


def test_a_position_does_not_depend_on_its_batch() -> None:
    """Coarse logits, as bfloat16 gives: ties at every border."""
    probs = torch.cat([random_logits(8, 3000, spread).bfloat16().float() for spread in SPREADS]).softmax(-1)
    settings = [SETTINGS[i % len(SETTINGS)] for i in range(len(probs))]
    together = truncated(probs, *settings)
    for i, setting in enumerate(settings):
        assert torch.equal(truncated(probs[i : i + 1], setting)[0], together[i])


@pytest.mark.parametrize("size", [8, 200, 4096])
def test_ties(size: int) -> None:
    probs = torch.full((1, size), 1 / size)
    first_quarter = torch.arange(size) < size // 4
    assert (truncated(probs, (3, 1.0, 0.0)) > 0).all()  # all are as likely as the third, as in Hugging Face
    assert torch.equal(truncated(probs, (0, 0.25, 0.0))[0] > 0, first_quarter)  # in no order there
    assert torch.equal(truncated(probs, (0, 1e-9, 0.0))[0] > 0, torch.arange(size) < 1)  # greedy
    assert (truncated(probs, (0, 1.0, 1.0)) > 0).all()


def test_one_likely_token_and_none_else() -> None:
    probs = torch.zeros(1, 5000)
    probs[0, 17] = 1.0
    for setting in SETTINGS:
        assert truncated(probs, setting).nonzero().tolist() == [[0, 17]]


def test_nothing_to_do_leaves_the_probs() -> None:
    probs = random_logits(2, 100, 1.0).softmax(-1).float()
    assert torch.equal(truncated(probs, (0, 1.0, 0.0), (100, 1.0, 0.0)), probs)

"""Sampling and top-k on a CPU against torch's and against their definitions in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from pagedbatch_kernels.cpu.build import can_load
from pagedbatch_kernels.cpu.sampling import CpuSamplingOps
from pagedbatch_kernels.sampling import Draws
from torch import Tensor

from pagedbatch.model.torch_sampling import TorchSamplingOps

pytestmark = pytest.mark.skipif(not can_load(), reason="there is no C++ compiler here")

VOCABULARY = 49_152
DTYPES = [torch.float32, torch.bfloat16]
LAST_UNIFORM = 1 - 2.0**-53


@pytest.fixture(scope="module")
def ops() -> CpuSamplingOps:
    return CpuSamplingOps()


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def logits_of(kind: str, batch_size: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random logits, around 5 as a model's often are."""
    logits = torch.randn(batch_size, size, generator=torch.Generator().manual_seed(size))
    spread = {"even": 0.01, "flat": 1.0, "peaked": 6.0, "tied": 3.0, "banned": 2.0, "equal": 0.0}[kind]
    logits = 5 + spread * logits
    if kind == "tied":
        logits = logits.round()
    if kind == "banned":  # all but one token in three, and never the first
        logits[:, torch.arange(size) % 3 != size // 2 % 3] = -torch.inf
    return logits.to(dtype)


@dataclass(frozen=True)
class Setting:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def draws(settings: list[Setting], uniforms: np.ndarray, count: int = 1) -> Draws:
    return Draws(
        [each.temperature for each in settings],
        [each.top_k for each in settings],
        [each.top_p for each in settings],
        [each.min_p for each in settings],
        [count] * len(settings),
        uniforms,
    )


def is_right(logits: Tensor, setting: Setting, uniform: float, token_id: int) -> bool:
    """Whether the definition gives this token, but for what float32 rounds at borders and in top_scores."""
    logits = logits.double().numpy()
    if setting.temperature == 0:
        return token_id == int(logits.argmax())
    weights = np.exp((logits - logits.max()) / setting.temperature)
    # Torch divides logits by the temperature before it subtracts: what it rounds there is a share of a weight.
    tolerance = 1e-6 + 2.0**-23 * abs(logits[np.isfinite(logits)]).max() / setting.temperature
    order = np.lexsort((np.arange(len(weights)), -weights))
    # Kept by all who round, then kept by any.
    return any(
        is_drawn(kept(weights, order, setting, 1 + sign * tolerance), uniform, token_id, tolerance) for sign in (-1, 1)
    )


def kept(weights: np.ndarray, order: np.ndarray, setting: Setting, slack: float) -> np.ndarray:
    weights = weights.copy()
    if 0 < setting.top_k < len(weights):
        weights[weights * slack < weights[order[setting.top_k - 1]]] = 0.0
    if setting.top_p < 1.0:
        ranked = weights[order]
        before = ranked.cumsum() - ranked
        weights[order[before >= setting.top_p * ranked.sum() * slack]] = 0.0
    weights[weights * slack < setting.min_p] = 0.0
    return weights


def is_drawn(weights: np.ndarray, uniform: float, token_id: int, tolerance: float) -> bool:
    ends = weights.cumsum()
    target, tolerance = uniform * ends[-1], tolerance * ends[-1]
    return bool(weights[token_id] > 0 and ends[token_id] - weights[token_id] - tolerance <= target) and bool(
        target < ends[token_id] + tolerance
    )


# --- draw ------------------------------------------------------------------------------------------------------------

SETTINGS = [
    Setting(0.0), Setting(), Setting(0.3), Setting(1.7), Setting(top_p=0.95), Setting(top_p=0.5),
    Setting(top_p=1e-9), Setting(top_p=0.99999), Setting(0.6, top_p=0.9), Setting(top_k=1), Setting(top_k=5),
    Setting(top_k=50), Setting(top_k=400), Setting(top_k=60, top_p=0.8), Setting(top_k=10**9, top_p=0.3),
    Setting(min_p=0.05), Setting(min_p=1.0), Setting(1.3, 1000, 0.99, 0.001), Setting(top_k=-1, top_p=0.7, min_p=0.2),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["even", "flat", "peaked", "tied", "banned", "equal"])
@pytest.mark.parametrize("sizes", [range(1, 71), [255, 256, 257, 1000], [VOCABULARY]], ids=["tiny", "small", "large"])
def test_draws_equal_torch(ops: CpuSamplingOps, sizes: list[int], kind: str, dtype: torch.dtype) -> None:
    """Every mismatch must be one of rounding, and few are."""
    random = np.random.default_rng(1)
    num_draws = mismatches = 0
    for size in sizes:
        logits = logits_of(kind, len(SETTINGS), size, dtype)
        uniforms = random.random(len(SETTINGS))
        found = ops.draw(logits, draws(SETTINGS, uniforms))
        expected = TorchSamplingOps().draw(logits.float(), draws(SETTINGS, uniforms))
        num_draws += len(found)
        for i in (found != expected).nonzero().flatten().tolist():
            mismatches += 1
            assert is_right(logits[i], SETTINGS[i], uniforms[i], int(found[i])), f"{size}, {SETTINGS[i]}, {uniforms[i]}"
    assert mismatches <= num_draws / 100


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["flat", "peaked", "tied"])
def test_draws_are_as_defined(ops: CpuSamplingOps, kind: str, dtype: torch.dtype) -> None:
    logits = logits_of(kind, len(SETTINGS), 5000, dtype)
    uniforms = np.random.default_rng(2).random((len(SETTINGS), 12))
    uniforms[:, :2] = 0.0, LAST_UNIFORM
    found = ops.draw(logits, draws(SETTINGS, uniforms.ravel(), 12)).view(-1, 12)
    for i, setting in enumerate(SETTINGS):
        for uniform, token_id in zip(uniforms[i], found[i].tolist(), strict=True):
            assert is_right(logits[i], setting, uniform, token_id), f"{setting}, {uniform}: {token_id}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["flat", "peaked", "tied", "banned"])
def test_truncated_probs_equal_torch(ops: CpuSamplingOps, kind: str, dtype: torch.dtype) -> None:
    """What is kept may differ by rounding at the border."""
    settings = [setting for setting in SETTINGS if setting.temperature > 0]
    logits = logits_of(kind, len(settings), 5000, dtype)
    asked = draws(settings, np.random.default_rng(4).random(12 * len(settings)), 12)
    found = ops.truncated_probs(logits, asked)
    expected = TorchSamplingOps().truncated_probs(logits.float(), asked)
    expected /= expected.amax(-1, keepdim=True)
    both = (found > 0) & (expected > 0)
    torch.testing.assert_close(found * both, expected * both, rtol=1e-5, atol=1e-7)
    at_border = torch.where(both, 0.0, found + expected)
    one_token = at_border.amax(-1)  # a tie or near-tie at the border
    assert (at_border.sum(-1) - one_token <= 1e-6 * expected.sum(-1)).all()
    drawn = ops.draw(logits, asked).view(-1, 12)
    assert (found.gather(1, drawn) > 0).all()


@pytest.mark.parametrize("place", [0, 1, 700, VOCABULARY - 1])
def test_tokens_without_weight_are_never_drawn(ops: CpuSamplingOps, place: int) -> None:
    logits = torch.full((len(SETTINGS), VOCABULARY), -torch.inf)
    logits[:, place] = -3.0
    for uniform in (0.0, 0.4, LAST_UNIFORM):
        found = ops.draw(logits, draws(SETTINGS, np.full(len(SETTINGS), uniform)))
        assert found.tolist() == [place] * len(SETTINGS)


def test_points_at_borders_belong_to_the_next_token(ops: CpuSamplingOps) -> None:
    logits = torch.zeros(1, 512)
    uniforms = np.array([0.0, 2.0**-9, 2.0**-9 - 2.0**-60, 0.5 - 2.0**-53, 0.5, LAST_UNIFORM])
    assert ops.draw(logits, draws([Setting()], uniforms, 6)).tolist() == [0, 1, 0, 255, 256, 511]


def test_a_nucleus_ends_within_equals(ops: CpuSamplingOps) -> None:
    """Of equals at the border, only the first stay; and equals of the k-th all stay."""
    logits = torch.zeros(1, 40_000)
    uniforms = np.linspace(0.0, LAST_UNIFORM, 500)
    token_ids = ops.draw(logits, draws([Setting(top_p=0.25)], uniforms, 500))
    assert (token_ids.min(), token_ids.max()) == (0, 9_999)
    token_ids = ops.draw(logits, draws([Setting(top_k=3)], uniforms, 500))
    assert (token_ids.min(), token_ids.max()) == (0, 39_999)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_position_depends_on_nothing_else(ops: CpuSamplingOps, dtype: torch.dtype) -> None:
    """Neither on the rest of the batch and the threads, nor on where it lies."""
    wide = logits_of("flat", 24, 3100, dtype)
    logits = wide[:, 50:3050]
    settings = [SETTINGS[i % len(SETTINGS)] for i in range(24)]
    uniforms = np.random.default_rng(3).random(24)
    cum_logprobs = torch.zeros(24)
    found = ops.draw(logits, draws(settings, uniforms))
    logsumexp = ops.logsumexp(logits)
    top_scores, indices = ops.joint_topk(logits, logsumexp, cum_logprobs, 1, 40)
    torch.set_num_threads(1)
    for i in range(24):
        row = logits[i : i + 1].clone()
        assert ops.draw(row, draws(settings[i : i + 1], uniforms[i : i + 1])).tolist() == found[i : i + 1].tolist()
        assert torch.equal(ops.logsumexp(row), logsumexp[i : i + 1])
        own_scores, own_indices = ops.joint_topk(row, logsumexp[i : i + 1], cum_logprobs[:1], 1, 40)
        assert torch.equal(own_scores[0], top_scores[i])
        assert torch.equal(own_indices[0], indices[i])


def test_logits_that_are_no_numbers_end_in_some_token(ops: CpuSamplingOps) -> None:
    for bad in (torch.nan, torch.inf, -torch.inf):
        logits = torch.full((len(SETTINGS), 600), bad)
        found = ops.draw(logits, draws(SETTINGS, np.full(len(SETTINGS), 0.5)))
        assert ((found >= 0) & (found < 600)).all()
        assert not torch.isfinite(ops.logsumexp(logits)).any()
        _, indices = ops.joint_topk(logits, ops.logsumexp(logits), torch.zeros(len(logits)), 1, 30)
        assert ((indices >= 0) & (indices < 600)).all()


# --- logsumexp and joint_topk -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 3, 15, 16, 17, 300, VOCABULARY])
def test_logsumexp(ops: CpuSamplingOps, size: int, dtype: torch.dtype) -> None:
    for kind in ("even", "flat", "peaked", "banned"):
        logits = logits_of(kind, 5, size, dtype)
        expected = logits.double().logsumexp(-1)
        torch.testing.assert_close(ops.logsumexp(logits).double(), expected, atol=1e-6, rtol=1e-7)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 5, 298, 299])
def test_logsumexp_tells_what_is_no_number(ops: CpuSamplingOps, place: int, bad: float) -> None:
    logits = logits_of("flat", 3, 300)
    logits[1, place] = bad
    assert torch.isfinite(ops.logsumexp(logits)).tolist() == [True, False, True]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["flat", "peaked", "tied", "banned", "equal"])
@pytest.mark.parametrize("size", [1, 7, 64, 65, 1000, 9000])
@pytest.mark.parametrize("group_size", [1, 3])
def test_joint_topk_is_that_of_a_sort(
    ops: CpuSamplingOps, group_size: int, size: int, kind: str, dtype: torch.dtype
) -> None:
    logits = logits_of(kind, 2 * group_size, size, dtype) - 5
    logsumexp = logits.float().logsumexp(-1)
    cum_logprobs = -torch.arange(2.0 * group_size)
    everything = (logits.float() - logsumexp.unsqueeze(1) + cum_logprobs.unsqueeze(1)).view(2, -1)
    expected, order = everything.sort(dim=-1, descending=True, stable=True)
    for k in (0, 1, 2, 8, 300, group_size * size):
        if k <= group_size * size:
            top_scores, indices = ops.joint_topk(logits, logsumexp, cum_logprobs, group_size, k)
            assert torch.equal(top_scores, expected[:, :k])
            assert torch.equal(indices, order[:, :k])


def test_zeros_are_equal_whatever_their_sign(ops: CpuSamplingOps) -> None:
    zeros = torch.tensor([[-0.0, 0.0, -0.0, -1.0]])
    assert ops.joint_topk(zeros, torch.zeros(1), torch.full((1,), -0.0), 1, 4)[1].tolist() == [[0, 1, 2, 3]]


def test_what_does_not_fit_is_refused(ops: CpuSamplingOps) -> None:
    logits, one = logits_of("flat", 2, 30), torch.zeros(1)
    for wrong in (logits.double(), logits.half(), logits[0], logits.T, logits[:, :0]):
        with pytest.raises(ValueError, match="expected float32 or bfloat16 logits"):
            ops.logsumexp(wrong)
    with pytest.raises(ValueError, match=r"draws for \[1\] positions with 1 uniforms, 2 positions"):
        ops.draw(logits, draws([Setting()], np.zeros(1)))
    with pytest.raises(ValueError, match=r"draws for \[2\] positions with 3 uniforms, 2 positions"):
        ops.draw(logits, draws([Setting()] * 2, np.zeros(3)))
    with pytest.raises(ValueError, match=r"expected contiguous torch.float32 \[2\] on the CPU"):
        ops.joint_topk(logits, one, one, 1, 3)
    for group_size, k in ((3, 1), (2, 61), (1, -1)):
        with pytest.raises(ValueError, match=f"top {k} of groups of {group_size}, for 2 positions of 30 logits"):
            ops.joint_topk(logits, torch.zeros(2), torch.zeros(2), group_size, k)

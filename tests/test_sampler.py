"""Draws, ranks and logprobs from given logits: exact where exactness is promised, chi-square where chance decides."""

from __future__ import annotations

import itertools
import math
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from pagedbatch_kernels.cpu.build import can_load
from pagedbatch_kernels.cpu.sampling import CpuSamplingOps
from pagedbatch_kernels.sampling import SamplingOps
from torch import Tensor

from pagedbatch.model.logprobs import NOT_NUMBERS
from pagedbatch.model.philox import uniforms
from pagedbatch.model.sampler import NOTHING_LEFT, Sampler
from pagedbatch.model.torch_sampling import TorchSamplingOps
from pagedbatch.params import GenerationParams
from pagedbatch.step import BeamResult, BeamTask, History, SampleResult, SampleTask, SchedulerOutput

EOS = frozenset({2})
#: What the samplers here work with: each in turn.
OPS: SamplingOps = TorchSamplingOps()


@pytest.fixture(params=["torch", "cpu"], autouse=True)
def ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SamplingOps:
    if request.param == "cpu":
        if not can_load():
            pytest.skip("there is no C++ compiler here")
        monkeypatch.setattr(sys.modules[__name__], "OPS", CpuSamplingOps())
    return OPS


def normal(*size: int, seed: int = 0, spread: float = 2.0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)) * spread


def step(samples: list[SampleTask], beams: list[BeamTask]) -> SchedulerOutput:
    return SchedulerOutput(0, [], samples, beams, [], [], [], 0)


def sample(logits: Tensor, tasks: list[SampleTask]) -> list[SampleResult]:
    samples, _ = Sampler(EOS, OPS)(logits, step(tasks, []))
    return samples


def rank(logits: Tensor, tasks: list[BeamTask]) -> list[BeamResult]:
    _, beams = Sampler(EOS, OPS)(logits, step([], tasks))
    return beams


def task(row: int, params: GenerationParams, indices: tuple[int, ...] = (0,), position: int = 0) -> SampleTask:
    return SampleTask(row, params, rng_key=2**63 + row, sample_indices=indices, position=position)


# --- samples ---------------------------------------------------------------------------------------------------------


def test_processed_logprobs_do_not_depend_on_the_batch() -> None:
    """torch's logsumexp sums a lone position by as many parts as there are threads."""
    params = GenerationParams(temperature=0.9, logprobs=0, logprobs_mode="processed")
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for seed in range(0, 200, 4):
            logits = normal(4, 49_152, seed=seed, spread=4.0)
            tasks = [task(row, params) for row in range(4)]
            assert sample(logits.clone(), tasks)[0] == sample(logits[:1].clone(), tasks[:1])[0]
    finally:
        torch.set_num_threads(threads)


def definition(logits: Tensor, p: GenerationParams) -> np.ndarray:
    """Probabilities after temperature, top-k, top-p and min-p, one token at a time."""
    odds = (logits.double() / p.temperature).softmax(-1).tolist()
    order = sorted(range(len(odds)), key=lambda i: -odds[i])
    if p.top_k > 0:
        order = order[: p.top_k]
    total, before, kept = sum(odds[i] for i in order), 0.0, []
    for i in order:
        if before < p.top_p * total and odds[i] >= p.min_p * odds[order[0]]:
            kept.append(i)
        before += odds[i]
    result = np.zeros(len(odds))
    result[kept] = [odds[i] for i in kept]
    probabilities: np.ndarray = result / result.sum()
    return probabilities


@pytest.mark.parametrize(
    "params",
    [
        GenerationParams(temperature=1.0),
        GenerationParams(temperature=0.5),
        GenerationParams(temperature=2.5),
        GenerationParams(temperature=1.0, top_k=5),
        GenerationParams(temperature=1.3, top_p=0.8),
        GenerationParams(temperature=1.0, min_p=0.2),
        GenerationParams(temperature=1.5, top_k=12, top_p=0.9, min_p=0.05),
    ],
    ids=lambda p: f"T{p.temperature}-k{p.top_k}-p{p.top_p}-m{p.min_p}",
)
def test_draws_follow_the_distribution(params: GenerationParams) -> None:
    """Chi-square at the 0.999 quantile; seeds are fixed, so that it passes always or never."""
    logits, count = normal(1, 30), 20_000
    expected = definition(logits[0], params) * count
    drawn = sample(logits, [task(0, params, tuple(range(count)))])[0].token_ids
    found = np.bincount(drawn, minlength=30)
    assert (found[expected == 0] == 0).all()
    often = expected >= 5
    statistic = ((found - expected)[often] ** 2 / expected[often]).sum()
    freedom = int(often.sum()) - 1
    assert statistic < freedom + 3.1 * math.sqrt(2 * freedom) + 5


def test_n_draws_from_one_row_equal_single_draws() -> None:
    params = GenerationParams(temperature=1.0, n=6, top_p=0.9)
    logits = normal(1, 500)
    together = sample(logits, [task(0, params, tuple(range(6)), position=4)])[0]
    alone = [sample(logits, [task(0, params, (i,), position=4)])[0] for i in range(6)]
    assert together.token_ids == [result.token_ids[0] for result in alone]
    assert together.logprobs == [result.logprobs[0] for result in alone]
    assert len(set(together.token_ids)) > 1


def test_a_draw_is_the_inverse_of_its_uniform() -> None:
    logits = normal(1, 500)
    points = uniforms(np.array([2**63], np.uint64), np.array([3], np.uint64), np.array([7], np.uint64))
    expected = int(np.searchsorted(logits[0].double().softmax(-1).cumsum(-1).numpy(), points[0], side="right"))
    result = sample(logits, [task(0, GenerationParams(temperature=1.0), (3,), position=7)])
    assert result[0].token_ids == [expected]


def test_rows_do_not_depend_on_the_batch() -> None:
    """Greedy, random, truncated and controlled rows mixed; more rows than are worked on at once."""
    kinds = [
        GenerationParams(),
        GenerationParams(temperature=0.7, n=3),
        GenerationParams(temperature=1.2, top_p=0.95, logprobs=2),
        GenerationParams(temperature=1.0, top_k=300, min_p=0.01),
        GenerationParams(min_tokens=5, logit_bias=((9, 3.0),), logprobs=0),
    ]
    tasks = [task(i, kinds[i % 5], tuple(range(kinds[i % 5].n)), position=i) for i in range(60)]
    logits = normal(60, 40_000).bfloat16()
    together = sample(logits, tasks)
    assert together == [sample(logits[i : i + 1], [tasks[i]])[0] for i in range(60)]
    order = list(range(59, -1, -1))
    assert sample(logits[order], [tasks[i] for i in order]) == together[::-1]


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.zeros(2, 100)
    logits[0, [40, 70, 99]] = 1.0
    results = sample(logits, [task(0, GenerationParams()), task(1, GenerationParams())])
    assert [result.token_ids for result in results] == [[40], [0]]


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-6])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = normal(3, 300)
    results = sample(logits, [task(i, GenerationParams(temperature=temperature)) for i in range(3)])
    assert [result.token_ids[0] for result in results] == logits.argmax(-1).tolist()


def test_logprobs_are_raw_whatever_the_controls() -> None:
    logits = normal(1, 50)
    raw = logits[0].log_softmax(-1)
    for params in (
        GenerationParams(logprobs=4),
        GenerationParams(temperature=0.3, top_p=0.5, logprobs=4),
        GenerationParams(temperature=2.0, top_k=3, min_p=0.2, logprobs=4),
        GenerationParams(min_tokens=9, logit_bias=((11, 50.0),), logprobs=4),
    ):
        result = sample(logits, [task(0, params)])[0]
        assert result.logprobs[0] == pytest.approx(float(raw[result.token_ids[0]]), abs=1e-5)
        assert result.top_logprobs is not None
        best = raw.topk(4)
        assert [token_id for token_id, _ in result.top_logprobs[0]] == best.indices.tolist()
        assert [logprob for _, logprob in result.top_logprobs[0]] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_how_many_logprobs() -> None:
    logits = normal(4, 20)
    wanted = [None, 0, 3, 100]
    results = sample(logits, [task(i, GenerationParams(logprobs=count)) for i, count in enumerate(wanted)])
    assert results[0].top_logprobs is None
    assert [len(tops[0]) for tops in (result.top_logprobs for result in results[1:]) if tops] == [0, 3, 20]


def test_normalisers_are_logsumexp(ops: SamplingOps) -> None:
    logits = normal(20, 5000, spread=8.0)
    torch.testing.assert_close(ops.logsumexp(logits), logits.double().logsumexp(-1).float(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_no_numbers_fails_alone(temperature: float, bad: float) -> None:
    params = GenerationParams(temperature=temperature, top_p=0.9, logprobs=1)
    logits = normal(3, 400)
    expected = sample(logits, [task(i, params) for i in range(3)])
    logits[1, 7] = bad
    results = sample(logits, [task(i, params) for i in range(3)])
    assert results[1].error == NOT_NUMBERS
    assert [results[0], results[2]] == [expected[0], expected[2]]


def test_logits_of_minus_infinity_are_tokens_that_never_come() -> None:
    logits = torch.full((2, 64), -math.inf)
    logits[:, [5, 9]] = 0.0
    params = GenerationParams(temperature=1.0, logprobs=5)
    for result in sample(logits, [task(i, params, tuple(range(20))) for i in range(2)]):
        assert set(result.token_ids) == {5, 9}
        assert result.logprobs == pytest.approx([math.log(0.5)] * 20)
        assert result.top_logprobs is not None
        assert sorted(token_id for token_id, _ in result.top_logprobs[0]) == [5, 9]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_whose_controls_leave_nothing_fails_alone(temperature: float) -> None:
    params = GenerationParams(temperature=temperature, no_repeat_ngram_size=1)
    past = History(list(range(30)), [])
    tasks = [task(0, replace(params, no_repeat_ngram_size=0)), task(1, params)._replace(history=past)]
    results = sample(normal(2, 30), tasks)
    assert [result.error for result in results] == [None, NOTHING_LEFT]


# --- beams -----------------------------------------------------------------------------------------------------------


def beam_task(rows: range, num_candidates: int, **params: object) -> BeamTask:
    scores = [-0.4 * i for i in range(len(rows))]
    return BeamTask(rows, GenerationParams(num_beams=len(rows), **params), scores, num_candidates, position=3)  # type: ignore[arg-type]


def test_ranks_equal_brute_force() -> None:
    logits = normal(7, 300)
    tasks = [beam_task(range(4), 8), beam_task(range(4, 7), 9)]
    for result, ranked in zip(rank(logits, tasks), tasks, strict=True):
        logprobs = logits[list(ranked.seq_indices)].double().log_softmax(-1)
        everything = sorted(
            (
                (ranked.scores[parent] + float(logprobs[parent, token_id]), parent, token_id)
                for parent, token_id in itertools.product(range(len(ranked.seq_indices)), range(300))
            ),
            reverse=True,
        )[: ranked.num_candidates]
        assert list(zip(result.parents, result.token_ids, strict=True)) == [entry[1:] for entry in everything]
        assert result.scores == pytest.approx([score for score, _, _ in everything], abs=1e-4)
        own = [float(logprobs[parent, token_id]) for _, parent, token_id in everything]
        assert result.logprobs == pytest.approx(own, abs=1e-5)


def test_groups_ranked_together_are_ranked_as_alone() -> None:
    settings: list[dict[str, object]] = [{}, {"logprobs": 2}, {"min_tokens": 9}, {"logit_bias": ((8, 3.0),)}]
    settings += [{"logprobs": 1, "logprobs_mode": "processed", "logit_bias": ((8, 30.0),)}, {}]
    logits = normal(3 * len(settings), 80)
    tasks = [beam_task(range(3 * i, 3 * i + 3), 6, **each) for i, each in enumerate(settings)]
    together = rank(logits, tasks)
    alone = [rank(logits[3 * i : 3 * i + 3], [beam_task(range(3), 6, **each)])[0] for i, each in enumerate(settings)]
    assert together == alone
    assert together[4].top_logprobs is not None
    assert [top[0][0] for top in together[4].top_logprobs] == [8, 8, 8]


def test_continuations_that_cannot_come_are_not_returned() -> None:
    logits = torch.full((2, 64), -math.inf)
    logits[0, 5] = logits[1, 9] = logits[1, 10] = 0.0
    result = rank(logits, [beam_task(range(2), 8)])[0]
    assert sorted(zip(result.parents, result.token_ids, strict=True)) == [(0, 5), (1, 9), (1, 10)]
    assert all(math.isfinite(score) for score in result.scores)


def test_more_candidates_than_continuations() -> None:
    result = rank(normal(2, 3), [beam_task(range(2), 50)])[0]
    assert len(set(zip(result.parents, result.token_ids, strict=True))) == 6


def test_beams_beside_samples_and_a_group_that_is_no_numbers() -> None:
    logits = normal(6, 200)
    samples = [task(0, GenerationParams()), task(1, GenerationParams(temperature=1.0))]
    groups = [beam_task(range(2, 4), 4, logprobs=2), beam_task(range(4, 6), 4)]
    logits[5, 0] = math.nan
    drawn, ranked = Sampler(EOS, OPS)(logits, step(samples, groups))
    assert drawn == sample(logits[:2], samples)
    assert ranked[0] == rank(logits[2:4], [replace(groups[0], seq_indices=range(2))])[0]
    assert ranked[0].top_logprobs is not None
    assert [len(top) for top in ranked[0].top_logprobs] == [2, 2]
    assert (ranked[0].error, ranked[1].error) == (None, NOT_NUMBERS)


def test_top_logprobs_of_beams_are_raw() -> None:
    logits = normal(2, 40)
    result = rank(logits, [beam_task(range(2), 4, logprobs=3, logit_bias=((8, 30.0),))])[0]
    assert result.token_ids[0] == 8
    assert result.top_logprobs is not None
    for row, top in zip(logits.log_softmax(-1), result.top_logprobs, strict=True):
        assert [token_id for token_id, _ in top] == row.topk(3).indices.tolist()
        assert [logprob for _, logprob in top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-5)

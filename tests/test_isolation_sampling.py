"""A row of logits that is NaN or infinite changes no bit of what is drawn, ranked or listed for the others."""

from __future__ import annotations

import pytest
import torch
from bad_rows import with_one_bad_row
from pagedbatch_kernels.cpu.build import can_load
from pagedbatch_kernels.sampling import SamplingOps
from torch import Tensor

from pagedbatch.model.logprobs import NOT_NUMBERS
from pagedbatch.model.sampler import Sampler
from pagedbatch.model.torch_sampling import TorchSamplingOps
from pagedbatch.params import GenerationParams
from pagedbatch.step import BeamTask, SampleTask, SchedulerOutput

VOCAB_SIZES = [7, 33, 172, 577, 1000]
OPS = pytest.mark.parametrize("name", ["cpu", "torch"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def ops_of(name: str) -> SamplingOps:
    if name == "torch":
        return TorchSamplingOps()
    if not can_load():
        pytest.skip("there is no C++ compiler here")
    from pagedbatch_kernels.cpu.sampling import CpuSamplingOps

    return CpuSamplingOps()


def logits_of(num_rows: int, vocab_size: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(vocab_size)
    return (torch.randn(num_rows, vocab_size, generator=generator) * 3).to(dtype)


@OPS
@DTYPES
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_logsumexp_and_joint_topk(name: str, dtype: torch.dtype, vocab_size: int) -> None:
    ops = ops_of(name)
    if dtype not in ops.dtypes:
        pytest.skip("these read float32 alone")
    logits, cum_logprobs, k = logits_of(6, vocab_size, dtype), torch.randn(6), min(5, vocab_size)
    logsumexp = ops.logsumexp(logits)
    for mixed, bad, others in with_one_bad_row(logits):
        if (mixed == -torch.inf).any():
            continue  # what may not come, and no mistake
        found = ops.logsumexp(mixed)
        assert torch.equal(found[others], logsumexp[others])
        assert not found[bad].isfinite()
        for group_size in (1, 2, 3):
            groups = torch.tensor([group for group in range(6 // group_size) if group != bad // group_size])
            ranked = ops.joint_topk(mixed, found, cum_logprobs, group_size, k)
            expected = ops.joint_topk(logits, logsumexp, cum_logprobs, group_size, k)
            assert all(torch.equal(one[groups], other[groups]) for one, other in zip(ranked, expected, strict=True))


PARAMS = [
    GenerationParams(),
    GenerationParams(temperature=0.7, logprobs=3),
    GenerationParams(temperature=1.0, top_p=0.9, logprobs=2, logprobs_mode="processed"),
    GenerationParams(temperature=1.0, top_k=4, min_p=0.05),
    GenerationParams(temperature=1.3, min_tokens=9, logit_bias=((4, 1.0),), logprobs=1),
]
BEAMS = [GenerationParams(num_beams=2, logprobs=2), GenerationParams(num_beams=2, min_tokens=9)]


@OPS
@DTYPES
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_draws_and_beams(name: str, dtype: torch.dtype, vocab_size: int) -> None:
    sampler = Sampler(frozenset({2}), ops_of(name))
    samples = [SampleTask(row, params, row, (0, 1), 2) for row, params in enumerate(PARAMS)]
    beams = [BeamTask(range(5 + 2 * i, 7 + 2 * i), params, [-1.0, -2.0], 4, 2) for i, params in enumerate(BEAMS)]
    step = SchedulerOutput(0, [], samples, beams, [], [], [], 9)
    logits = logits_of(9, vocab_size, dtype)
    drawn, ranked = sampler(logits, step)
    for bad in range(9):
        for value in (torch.nan, torch.inf):
            for columns in (slice(None), slice(-1, None)):
                mixed = logits.clone()
                mixed[bad, columns] = value
                found_drawn, found_ranked = sampler(mixed, step)
                for row in range(5):
                    assert found_drawn[row].error == NOT_NUMBERS if row == bad else found_drawn[row] == drawn[row]
                for group in range(2):
                    is_bad = bad >= 5 and group == (bad - 5) // 2
                    assert found_ranked[group].error == NOT_NUMBERS if is_bad else found_ranked[group] == ranked[group]

"""What must never change a result (float32, CPU): pool size, preemption, block size, batch, order, prefix cache."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Run, run_engine
from pagedbatch_kernels.cpu.build import can_load

from pagedbatch.model.packed_linear import OneDnnLinears, choose_linears
from pagedbatch.params import GenerationParams
from pagedbatch.sequence import Request


def mixed_requests() -> list[Request]:
    """30 rows of 60 new tokens: greedy, 8 seeded samples, 4 beams; some share a prefix longer than a block."""
    rng = random.Random(11)
    prefix = [1] + [rng.randrange(4, 256) for _ in range(40)]
    kinds = [
        GenerationParams(max_tokens=60, ignore_eos=True),
        GenerationParams(n=8, temperature=0.8, top_p=0.9, max_tokens=60, ignore_eos=True),
        GenerationParams(num_beams=4, n=4, max_tokens=60),
    ]
    requests = []
    for row in range(30):
        own = [rng.randrange(4, 256) for _ in range(rng.randrange(1, 60))]
        prompt = prefix + own if row % 2 else [1, *own]
        requests.append(Request(row, prompt, kinds[row % 3], rng_key=1000 + row))
    return requests


@cache
def roomy(path: Path) -> Run:
    return run_engine(path, mixed_requests(), num_blocks=4000, max_num_seqs=256)


def assert_same_results(run: Run, expected: Run) -> None:
    assert run.token_ids() == expected.token_ids()
    for row, result in run.outputs.items():
        for output, wanted in zip(result.outputs, expected.outputs[row].outputs, strict=True):
            assert output.finish_reason == wanted.finish_reason
            assert output.stop_reason == wanted.stop_reason
            assert output.cumulative_logprob == pytest.approx(wanted.cumulative_logprob, abs=1e-3, rel=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_blocks": 80, "block_size": 16, "num_swap_blocks": 400, "preemption": "swap"},
        {"num_blocks": 80, "block_size": 16, "preemption": "recompute"},
        {"num_blocks": 80, "block_size": 16, "preemption": "recompute", "prefix_cache": False},
        {"num_blocks": 80, "block_size": 16, "num_swap_blocks": 60, "preemption": "auto"},
    ],
    ids=lambda settings: "-".join(str(v) for v in settings.values()),
)
def test_preemption_is_invisible(rand_model_path: Path, settings: dict[str, Any]) -> None:
    run = run_engine(rand_model_path, mixed_requests(), **settings)
    preemptions = run.counters.preemptions_swap + run.counters.preemptions_recompute
    assert preemptions > 20
    if settings["preemption"] == "swap":
        assert run.counters.preemptions_recompute == 0
    if settings["preemption"] == "recompute":
        assert run.counters.preemptions_swap == 0
        assert run.counters.recomputed_tokens > 0
    assert_same_results(run, roomy(rand_model_path))


@pytest.mark.parametrize(
    "settings",
    [
        {"block_size": 8},
        {"block_size": 32},
        {"max_num_seqs": 1},
        {"max_num_seqs": 7},
        {"max_num_seqs": 64},
        {"max_num_batched_tokens": 16},
        {"prefix_cache": False},
        {"attention": "torch"},
    ],
    ids=lambda settings: "-".join(f"{k}={v}" for k, v in settings.items()),
)
def test_engine_settings_are_speed_settings_only(rand_model_path: Path, settings: dict[str, Any]) -> None:
    assert_same_results(run_engine(rand_model_path, mixed_requests(), **settings), roomy(rand_model_path))


def test_order_does_not_matter(rand_model_path: Path) -> None:
    requests = mixed_requests()
    random.Random(3).shuffle(requests)
    assert_same_results(run_engine(rand_model_path, requests, max_num_seqs=32), roomy(rand_model_path))


@pytest.mark.skipif(not can_load(), reason="there is no C++ compiler here: torch's products round by the batch")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_cpu_every_bit_is_the_same_in_any_batch(rand_model_path: Path, dtype: str) -> None:
    if dtype == "bfloat16" and isinstance(choose_linears(torch.bfloat16), OneDnnLinears):
        pytest.skip("this CPU multiplies matrices of bfloat16, and oneDNN's products round by the batch")
    requests = [replace(request, params=replace(request.params, logprobs=3)) for request in mixed_requests()]
    expected = run_engine(rand_model_path, requests, num_blocks=4000, max_num_seqs=256, dtype=dtype)
    for settings in (
        {"max_num_seqs": 8},
        {"max_num_batched_tokens": 16, "block_size": 8},
        {"num_blocks": 80, "preemption": "recompute"},
        {"num_blocks": 80, "num_swap_blocks": 400, "preemption": "swap"},
        {"prefix_cache": False, "max_num_seqs": 33},
    ):
        run = run_engine(rand_model_path, requests, dtype=dtype, **settings)
        for row, result in run.outputs.items():
            assert result.outputs == expected.outputs[row].outputs

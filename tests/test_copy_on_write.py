"""Samples and beams that share blocks, at every place where a prompt can end in a block.

`run_engine` checks after each step that no block with two owners was written.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from engines import Run, hf_beams, hf_model, run_engine

from pagedbatch.model.sampler import Sampler
from pagedbatch.params import GenerationParams
from pagedbatch.sequence import Request
from pagedbatch.step import SampleTask, SchedulerOutput

PROMPT_LENGTHS = [1, 15, 16, 17, 31, 32, 33]
NUM_NEW = 24
SAMPLES = GenerationParams(n=4, temperature=0.9, top_p=0.95, max_tokens=NUM_NEW, ignore_eos=True)
BEAMS = GenerationParams(num_beams=4, n=4, max_tokens=NUM_NEW)


def prompt(length: int) -> list[int]:
    rng = random.Random(length)
    return [1] + [rng.randrange(4, 256) for _ in range(length - 1)]


def requests(params: GenerationParams) -> list[Request]:
    return [Request(length, prompt(length), params, rng_key=500 + length) for length in PROMPT_LENGTHS]


def drawn_alone(path: Path, request: Request, sample_index: int) -> list[int]:
    """One sample by Hugging Face's model over the whole sequence at each position: nothing shared, nothing cached."""
    model, sampler = hf_model(path), Sampler(frozenset())
    token_ids: list[int] = []
    with torch.inference_mode():
        for position in range(request.params.max_tokens):
            logits = model(torch.tensor([request.prompt_token_ids + token_ids])).logits[0, -1:]
            task = SampleTask(0, request.params, request.rng_key, (sample_index,), position)
            samples, _ = sampler(logits, SchedulerOutput(0, [], [task], [], [], [], [], 0))
            token_ids += samples[0].token_ids
    return token_ids


@pytest.fixture(scope="module")
def samples_alone(rand_model_path: Path) -> dict[int, list[list[int]]]:
    return {r.request_id: [drawn_alone(rand_model_path, r, i) for i in range(4)] for r in requests(SAMPLES)}


@pytest.fixture(scope="module")
def beams_by_hf(rand_model_path: Path) -> dict[int, list[list[int]]]:
    return {length: [ids for ids, _ in hf_beams(rand_model_path, prompt(length), BEAMS)] for length in PROMPT_LENGTHS}


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_samples_equal_samples_drawn_alone(
    rand_model_path: Path, samples_alone: dict[int, list[list[int]]], block_size: int, prefix_cache: bool
) -> None:
    run = run_engine(rand_model_path, requests(SAMPLES), block_size=block_size, prefix_cache=prefix_cache)
    assert run.token_ids() == samples_alone
    assert all(len({tuple(ids) for ids in samples}) == 4 for samples in samples_alone.values())
    # Three of four copy the prompt's last block, unless it is full; the fourth writes on in the original.
    assert run.counters.cow_copies == sum(3 for length in PROMPT_LENGTHS if length % block_size)


@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_beams_equal_hf(rand_model_path: Path, beams_by_hf: dict[int, list[list[int]]], block_size: int) -> None:
    run = run_engine(rand_model_path, requests(BEAMS), block_size=block_size)
    assert run.token_ids() == beams_by_hf
    assert run.counters.cow_copies > 0


def test_full_blocks_of_a_prompt_are_held_once(rand_model_path: Path) -> None:
    """Eight samples after 64 tokens in blocks of 16: four shared blocks, and one block of its own for each."""
    params = GenerationParams(n=8, temperature=1.0, max_tokens=16, ignore_eos=True)
    run = run_engine(rand_model_path, [Request(0, prompt(64), params)])
    assert run.counters.cow_copies == 0
    for snapshot in run.snapshots[1:]:
        pool = snapshot.pool
        assert (pool.shared, pool.private, pool.logical) == (4, 8, 40)
    saving = 1 - run.snapshots[-1].pool.live / run.snapshots[-1].pool.logical
    assert saving == pytest.approx(0.7)


def test_beams_share_more_than_the_prompt(rand_model_path: Path) -> None:
    """What survivors have in common is theirs together: fewer blocks than four sequences of that length need."""
    run = run_engine(rand_model_path, [Request(0, prompt(33), BEAMS)], block_size=8)
    assert max(snapshot.pool.shared for snapshot in run.snapshots) > 33 // 8
    assert all(snapshot.pool.live < snapshot.pool.logical for snapshot in run.snapshots[1:])


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_sharing_survives_preemption(
    rand_model_path: Path, samples_alone: dict[int, list[list[int]]], preemption: str
) -> None:
    def run_in(num_blocks: int) -> Run:
        swap = 200 if preemption == "swap" else 0
        return run_engine(
            rand_model_path,
            requests(SAMPLES),
            num_blocks=num_blocks,
            num_swap_blocks=swap,
            block_size=8,
            preemption=preemption,
            prefix_cache=False,
        )

    run = run_in(40)
    assert run.counters.preemptions_swap + run.counters.preemptions_recompute > 0
    assert run.token_ids() == samples_alone

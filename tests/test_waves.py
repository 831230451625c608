"""More samples than may run at once: they take turns on the prompt's blocks, and draw what all at once would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import run_engine, tokenizer
from fake_runs import FakeRun, blocks_at_most, fake_engine, fake_run
from hypothesis import given
from hypothesis import strategies as st

from pagedbatch.engine.block_manager import BlockManager
from pagedbatch.params import GenerationParams
from pagedbatch.sequence import Request

BLOCK_SIZE = 4


def row(request_id: int, prompt_len: int, n: int, **params: Any) -> Request:
    prompt = [(request_id + i) % 9 + 1 for i in range(prompt_len)]
    return Request(request_id, prompt, GenerationParams(**{"n": n, "max_tokens": 9, "temperature": 1.0, **params}), 50)


def widest(run: FakeRun) -> int:
    return max(snapshot.running_sequences for snapshot in run.snapshots)


@pytest.mark.parametrize("max_num_seqs", [1, 16])
@pytest.mark.parametrize("prompt_len", [1, 7, 8, 9])
def test_three_hundred_samples(max_num_seqs: int, prompt_len: int) -> None:
    request = row(0, prompt_len, 300)
    expected = fake_run([request], max_num_seqs=300, num_blocks=2000)
    assert widest(expected) > 200
    run = fake_run([request], max_num_seqs=max_num_seqs)
    assert run.answers() == expected.answers()
    assert widest(run) == max_num_seqs


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_the_prompt_is_computed_once(prefix_cache: bool) -> None:
    run = fake_run([row(0, 10, 40)], max_num_seqs=3, prefix_cache=prefix_cache)
    computed = [token for step in run.steps for each in step.sequences for token in each.token_ids]
    kept = sum(len(output.token_ids) - 1 for output in run.outputs[0].outputs)
    assert len(computed) == 10 + kept


def test_blocks_are_bounded_by_the_width() -> None:
    """A pool that just holds three at once serves forty, without a preemption."""
    width = 3
    num_blocks = blocks_at_most(row(0, 10, width), BLOCK_SIZE)
    run = fake_run([row(0, 10, 40)], max_num_seqs=width, num_blocks=num_blocks)
    assert len(run.outputs[0].outputs) == 40
    assert run.counters.preemptions_recompute == run.counters.preemptions_swap == 0
    refused = fake_run([row(0, 10, 40)], max_num_seqs=width + 1, num_blocks=num_blocks)
    assert "KV blocks" in str(refused.outputs[0].error)


def test_a_wave_leaves_no_stale_block_behind() -> None:
    """A sample fills the prompt's last block, the next one overwrites it, and then the first one comes as a prompt."""
    first = row(0, 6, 30)
    alone = fake_run([first], max_num_seqs=30)
    engine = fake_engine(max_num_seqs=1)
    engine.add(first)
    engine.drain()
    for i, output in enumerate(alone.outputs[0].outputs):
        prompt = [*first.prompt_token_ids, *output.token_ids, 1, 2]
        again = Request(1 + i, prompt, GenerationParams(max_tokens=5), 3)
        engine.add(again)
        engine.drain()
        assert engine.answers()[1 + i] == fake_run([again]).answers()[1 + i]
    assert engine.counters.prefix_hit_tokens > 0


def test_an_heir_is_found_under_its_own_tokens() -> None:
    """Six tokens of prompt, in blocks of four; the finished sample had six more."""
    blocks = BlockManager(num_blocks=8, block_size=BLOCK_SIZE)
    root, prompt = blocks.root_of(0), list(range(6))
    histories = {1: [*prompt, *range(20, 26)], 2: [*prompt, *range(30, 36)]}
    blocks.create_table(1, root, [])
    blocks.extend(1, 0, 12)
    blocks.cache_full_blocks(1, 12, lambda start, stop: histories[1][start:stop])
    blocks.transfer_table(1, 2, 6)
    blocks.check_integrity()
    assert blocks.counts().logical == 2
    assert len(blocks.match_prefix(root, [*histories[1], 0])) == 1  # its second block is about to be overwritten
    blocks.extend(2, 6, 12)
    blocks.cache_full_blocks(2, 12, lambda start, stop: histories[2][start:stop])
    found = blocks.match_prefix(root, [*histories[2], 0])
    assert [entry.block_id for entry in found] == blocks.block_table(2)
    blocks.free(2)
    blocks.check_integrity()
    assert blocks.counts().live == 0


@given(
    rows=st.lists(st.tuples(st.integers(1, 14), st.integers(1, 12), st.booleans()), min_size=1, max_size=6),
    max_num_seqs=st.integers(1, 6),
    num_blocks=st.integers(24, 40),
    num_swap_blocks=st.sampled_from([0, 40]),
    prefix_cache=st.booleans(),
    max_num_batched_tokens=st.sampled_from([3, 16, 2048]),
)
def test_waves_are_invisible(rows: list[tuple[int, int, bool]], num_blocks: int, **settings: Any) -> None:
    """Whatever runs beside them and however little memory there is, samples and beams alike."""
    requests = [
        row(i, prompt_len, 1, num_beams=min(n, 3), temperature=0.0) if is_beams else row(i, prompt_len, n)
        for i, (prompt_len, n, is_beams) in enumerate(rows)
    ]
    expected = fake_run(requests, max_num_seqs=200)
    assert fake_run(requests, num_blocks=num_blocks, **settings).answers() == expected.answers()


@pytest.mark.parametrize("max_num_seqs", [1, 16])
def test_the_model_draws_the_same_in_waves(rand_model_path: Path, max_num_seqs: int) -> None:
    params = GenerationParams(n=300, temperature=1.0, max_tokens=3, logprobs=0)
    request = Request(0, tokenizer(rand_model_path)("a prompt past one block").input_ids, params, 11)
    expected = run_engine(rand_model_path, [request], max_num_seqs=300)
    run = run_engine(rand_model_path, [request], max_num_seqs=max_num_seqs)
    assert run.token_ids() == expected.token_ids()
    assert len(run.outputs[0].outputs) == 300
    for output, wanted in zip(run.outputs[0].outputs, expected.outputs[0].outputs, strict=True):
        assert output.token_logprobs == pytest.approx(wanted.token_logprobs, abs=1e-4)


def test_best_of_in_waves(rand_model_path: Path) -> None:
    params = GenerationParams(n=3, best_of=40, temperature=1.0, max_tokens=6)
    request = Request(0, tokenizer(rand_model_path)("best").input_ids, params, 11)
    narrow, wide = (run_engine(rand_model_path, [request], max_num_seqs=width).token_ids() for width in (4, 40))
    assert narrow == wide

"""What a row needs at most, against what there is."""

from __future__ import annotations

from typing import Any

import pytest
from fake_runs import fake_engine, fake_run, request

from pagedbatch.config import EngineConfig
from pagedbatch.engine.admission import refusal

MIB = 2**20


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"n": 60000, "max_tokens": 100}, "(n 60000, max_tokens 100), but a row gets at most 0.10 GiB: lower n or max"),
        ({"n": 10, "best_of": 60000}, "(best_of 60000, max_tokens 256)"),
        ({"n": 200, "max_tokens": 100, "logprobs": 20}, "lower n or max_tokens or logprobs"),
        ({"max_tokens": 0, "prompt_logprobs": 100}, "lower n or max_tokens or prompt_logprobs"),
        ({"num_beams": 500, "max_tokens": 1}, "(num_beams 500, max_tokens 1)"),
        ({"num_beams": 64, "max_tokens": 1, "stop_token_ids": tuple(range(20000))}, "(num_beams 64, max_tokens 1)"),
    ],
    ids=str,
)
def test_a_row_that_needs_more_memory_than_there_is(params: dict[str, Any], words: str) -> None:
    config = EngineConfig(num_blocks=10**7, host_memory=100 * MIB, vocab_size=30000)
    params = {"temperature": 0.0 if "num_beams" in params or params.get("max_tokens") == 0 else 1.0} | params
    reason = refusal(config, request(0, 2000, **params)) or ""
    assert words in reason
    assert reason.startswith("may need ")


def test_the_others_are_answered() -> None:
    run = fake_engine(num_blocks=10**4, host_memory=MIB)
    run.add(request(0, 4), request(1, 4, n=4000, max_tokens=5), request(2, 4, n=400, max_tokens=5))
    run.drain()
    assert "may need 0.0" in (run.outputs[1].error or "")
    assert [run.outputs[row].error for row in (0, 2)] == [None, None]


@pytest.mark.parametrize("block_size", [1, 4])
def test_thousands_of_samples_take_turns_in_a_small_pool(block_size: int) -> None:
    run = fake_run([request(0, 4, n=3000, max_tokens=3)], num_blocks=64, block_size=block_size, max_num_seqs=4)
    assert len(run.outputs[0].outputs) == 3000
    assert max(snapshot.running_sequences for snapshot in run.snapshots) <= 4


@pytest.mark.parametrize("max_tokens", [1, 2, 40])
def test_beams_wider_than_any_budget_run_or_are_refused(max_tokens: int) -> None:
    run = fake_engine(num_blocks=600, max_num_seqs=4, max_num_batched_tokens=16)
    run.add(request(0, 4, num_beams=500, max_tokens=max_tokens, ignore_eos=True), request(1, 4, max_tokens=3))
    run.drain()
    assert run.outputs[1].error is None
    if max_tokens == 40:
        assert "KV blocks of 4 tokens (prompt 4 + max_tokens 40, 500 beams), but the pool has 600" in (
            run.outputs[0].error or ""
        )
    else:
        assert run.outputs[0].error is None

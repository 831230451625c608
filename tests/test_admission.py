"""What a row needs at most, against what there is."""

from __future__ import annotations

from typing import Any

import pytest
from fake_runner import FakeRunner
from fake_runs import VOCABULARY, fake_engine, fake_run, request
from hypothesis import example, given
from hypothesis import strategies as st

from pagedbatch.config import EngineConfig
from pagedbatch.engine.admission import (
    _CANDIDATE_BYTES,
    _LOGPROB_BYTES,
    _SCORE_BYTES,
    _SEQUENCE_BYTES,
    _TOKEN_BYTES,
    blocks_at_most,
    host_bytes_at_most,
    max_width,
    refusal,
)
from pagedbatch.sequence import SequenceGroup

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


def host_bytes(eos: int = 1, vocab_size: int | None = None, **params: Any) -> int:
    config = EngineConfig(num_blocks=1, eos_token_ids=frozenset(range(eos)), vocab_size=vocab_size)
    row = request(0, 10, **params)
    return host_bytes_at_most(config, SequenceGroup(row, 0, max_width(config, row.params)))


def test_memory_of_samples() -> None:
    """All outputs are held until the row is written, those that wait for their turn too."""
    assert host_bytes(n=600, max_tokens=7) == 600 * (_SEQUENCE_BYTES + 7 * _TOKEN_BYTES)


def test_memory_of_logprobs() -> None:
    """At each position the token's own, and the likeliest that were asked for."""
    plain = host_bytes(n=3, max_tokens=7)
    assert host_bytes(n=3, max_tokens=7, logprobs=0) - plain == 3 * 7 * _LOGPROB_BYTES
    assert host_bytes(n=3, max_tokens=7, logprobs=4) - plain == 3 * 7 * 5 * _LOGPROB_BYTES
    assert host_bytes(n=3, max_tokens=7, prompt_logprobs=4) - plain == 10 * 5 * _LOGPROB_BYTES


@pytest.mark.parametrize(
    ("eos", "stop", "per_beam"), [(0, 0, 2), (1, 0, 2), (1, 1, 3), (2, 0, 3), (1, 3, 5), (3, 1, 5)]
)
def test_memory_of_the_candidates_of_beams(eos: int, stop: int, per_beam: int) -> None:
    """Two for each beam, or one more than the tokens that can end it."""
    outputs = 4 * (_SEQUENCE_BYTES + 7 * _TOKEN_BYTES)
    stop_token_ids = tuple(range(10, 10 + stop))
    needed = host_bytes(eos, num_beams=4, max_tokens=7, stop_token_ids=stop_token_ids)
    assert needed == outputs + 4 * per_beam * _CANDIDATE_BYTES


def test_memory_of_diverse_beams() -> None:
    """A beam looks at one more candidate for each beam whose tokens may be penalised."""
    asked = {"num_beams": 4, "num_beam_groups": 2, "max_tokens": 7}
    needed = [host_bytes(**asked, diversity_penalty=penalty) for penalty in (0.0, 0.5)]
    assert needed[1] - needed[0] == 4 * 4 * _CANDIDATE_BYTES


@pytest.mark.parametrize(("vocab_size", "candidates"), [(1, 4), (2, 8), (3, 12), (4, 12), (1000, 12)])
def test_memory_of_a_vocabulary(vocab_size: int, candidates: int) -> None:
    """Each beam ranks every token of it, and there are no more candidates than tokens."""
    outputs = 4 * (_SEQUENCE_BYTES + 7 * _TOKEN_BYTES)
    needed = host_bytes(2, vocab_size, num_beams=4, max_tokens=7)
    assert needed == outputs + 4 * vocab_size * _SCORE_BYTES + candidates * _CANDIDATE_BYTES


def test_the_others_are_answered() -> None:
    run = fake_engine(num_blocks=10**4, host_memory=MIB)
    run.add(request(0, 4), request(1, 4, n=4000, max_tokens=5), request(2, 4, n=400, max_tokens=5))
    run.drain()
    assert "may need 0.0" in (run.outputs[1].error or "")
    assert [run.outputs[row].error for row in (0, 2)] == [None, None]


def test_the_last_token_takes_no_slot() -> None:
    """Its K/V are never computed: a prompt of 4 and 5 new tokens fill two blocks of 4."""
    config = EngineConfig(num_blocks=2, block_size=4)
    assert refusal(config, request(0, 4, max_tokens=5)) is None
    assert "needs 3 KV blocks" in (refusal(config, request(0, 4, max_tokens=6)) or "")
    assert fake_run([request(0, 4, max_tokens=5, ignore_eos=True)], num_blocks=2).outputs[0].error is None


@pytest.mark.parametrize(("n", "num_blocks"), [(1, 10), (3, 18)])
def test_under_a_window_neither_prompt_nor_output_sets_the_bound(n: int, num_blocks: int) -> None:
    """Two windows' worth of the prompt, as a step computes one at once, and one of each tail, with two borders each."""
    config = EngineConfig(num_blocks=num_blocks, block_size=4, window=8, max_num_batched_tokens=8)
    assert refusal(config, request(0, 400, n=n, max_tokens=300)) is None


def test_under_a_window_samples_that_take_turns_hold_a_prompt_each() -> None:
    """Six blocks of the prompt and four of the tail, for each of the two that run at once."""
    config = EngineConfig(num_blocks=1, block_size=4, window=8, max_num_batched_tokens=8, max_num_seqs=2)
    row = request(0, 400, n=5, max_tokens=300)
    assert blocks_at_most(config, SequenceGroup(row, 0, max_width(config, row.params))) == 20


def test_a_row_that_computes_nothing_is_never_refused() -> None:
    row = request(0, 100, max_tokens=0)
    assert row.computes_nothing
    assert refusal(EngineConfig(num_blocks=1, block_size=4), row) is None


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


class WindowRunner(FakeRunner):
    """Sees the last `window` tokens alone: the blocks before them may be gone."""

    def __init__(self, num_blocks: int, block_size: int, window: int) -> None:
        super().__init__(num_blocks, block_size, vocab_size=VOCABULARY)
        self.window = window

    def _read(self, block_table: list[int], length: int) -> tuple[int | None, ...]:
        size = self.block_size
        seen = range(max(0, length - self.window), length)
        assert all(block_table[position // size] >= 0 for position in seen), "a block left the table too early"
        return tuple(self.pool[block_table[position // size]][position % size] for position in seen)


@given(
    prompt_len=st.integers(1, 40),
    params=st.sampled_from([{}, {"n": 2}, {"n": 5}, {"num_beams": 3}, {"num_beams": 2}]),
    max_tokens=st.integers(1, 40),
    window=st.integers(1, 16),
    block_size=st.integers(1, 5),
    max_num_batched_tokens=st.integers(1, 12),
)
@example(prompt_len=12, params={"n": 5}, max_tokens=2, window=7, block_size=1, max_num_batched_tokens=2)
@example(prompt_len=40, params={}, max_tokens=1, window=4, block_size=4, max_num_batched_tokens=3)
def test_a_row_runs_in_the_fewest_blocks_that_admit_it(
    prompt_len: int, params: dict[str, Any], max_tokens: int, window: int, block_size: int, max_num_batched_tokens: int
) -> None:
    """The bound under a sliding window is enough: nothing stalls, and nothing is read that was given back."""
    row = request(0, prompt_len, max_tokens=max_tokens, ignore_eos=True, **params)
    settings: dict[str, Any] = {"window": window, "max_num_batched_tokens": max_num_batched_tokens}
    config = EngineConfig(num_blocks=1, block_size=block_size, **settings)
    num_blocks = blocks_at_most(config, SequenceGroup(row, 0, max_width(config, row.params)))
    runner = WindowRunner(num_blocks, block_size, window)
    run = fake_engine(num_blocks=num_blocks, block_size=block_size, runner=runner, **settings)
    run.add(row)
    run.drain()
    assert run.outputs[0].error is None
    assert run.counters.failed_steps == 0
    assert {len(output.token_ids) for output in run.outputs[0].outputs} == {max_tokens}

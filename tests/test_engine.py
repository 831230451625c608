"""Whole runs without a model: nothing that only concerns memory or speed may show in the outputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from examples import examples
from fake_runner import FakeRunner
from fake_runs import VOCABULARY, blocks_at_most, fake_engine, fake_run, request
from hypothesis import given, settings
from hypothesis import strategies as st
from request_strategies import batches, engine_settings

from pagedbatch.sequence import Request
from pagedbatch.step import ModelRunnerOutput, SchedulerOutput


@settings(max_examples=examples(30), deadline=None)
@given(batches, engine_settings(), st.integers(0, 12), st.randoms(use_true_random=False))
def test_outputs_depend_on_the_requests_only(
    batch: list[Request], config: dict[str, Any], spare: int, rng: Any
) -> None:
    roomy = fake_run(batch, block_size=16, prefix_cache=False)
    shuffled = rng.sample(batch, len(batch))
    largest = max(blocks_at_most(each, config["block_size"]) for each in batch)
    tight = fake_run(shuffled, num_blocks=largest + spare, **config)
    assert tight.answers() == roomy.answers()
    for step in tight.steps:
        assert step.num_tokens <= max(config["max_num_batched_tokens"], max(each.params.width for each in batch))


class RowBreaker:
    """A runner whose logits are not numbers for some rows."""

    def __init__(self, runner: FakeRunner, bad_keys: set[int], from_position: int) -> None:
        self._runner = runner
        self._bad_keys = bad_keys
        self._from_position = from_position

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        result = self._runner.execute(step)
        samples = [
            drawn._replace(error="not a number") if self._is_bad(task.rng_key, task.position) else drawn
            for task, drawn in zip(step.samples, result.samples, strict=True)
        ]
        beams = [
            replace(ranked, error="not a number") if self._is_bad(task.params.seed, task.position) else ranked
            for task, ranked in zip(step.beams, result.beams, strict=True)
        ]
        return ModelRunnerOutput(samples, beams)

    def _is_bad(self, key: int, position: int) -> bool:
        return key in self._bad_keys and position >= self._from_position


@settings(max_examples=examples(12), deadline=None)
@given(batches, engine_settings(), st.sets(st.integers(0, 6)), st.integers(0, 2), st.integers(0, 12))
def test_a_broken_row_leaves_the_others_alone(
    batch: list[Request], config: dict[str, Any], bad_keys: set[int], from_position: int, spare: int
) -> None:
    batch = [replace(each, params=replace(each.params, seed=each.rng_key)) for each in batch]  # beam tasks carry no key
    num_blocks = spare + max(blocks_at_most(each, config["block_size"]) for each in batch)
    fake = FakeRunner(num_blocks, config["block_size"], config["num_swap_blocks"], VOCABULARY)
    run = fake_engine(num_blocks=num_blocks, runner=RowBreaker(fake, bad_keys, from_position), **config)
    run.add(*batch)
    answers = run.drain().answers()
    expected = fake_run(batch, block_size=16).answers()
    for row, answer in answers.items():
        if answer == "not a number":
            assert row in bad_keys
        else:
            assert answer == expected[row]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_eight_samples_hold_a_prompt_once(prefix_cache: bool) -> None:
    run = fake_engine(block_size=16, prefix_cache=prefix_cache)
    run.add(request(0, 64, n=8, max_tokens=10, ignore_eos=True))
    run.step()
    run.step()
    pool = run.snapshots[-1].pool
    assert (pool.shared, pool.private, pool.logical) == (4, 8, 8 * 5)
    run.drain()
    assert run.counters.cow_copies == 0


@pytest.mark.parametrize("kind", [{"n": 4}, {"num_beams": 4}], ids=["samples", "beams"])
@pytest.mark.parametrize("prompt", [1, 15, 16, 17, 31, 32, 33])
def test_only_a_half_full_block_is_copied(prompt: int, kind: dict[str, int]) -> None:
    """All but the last writer copy it; beams may fork again and again, so theirs is a lower bound."""
    run = fake_run([request(0, prompt, max_tokens=8, ignore_eos=True, **kind)], block_size=16)
    expected = 3 if prompt % 16 else 0
    if "n" in kind:
        assert run.counters.cow_copies == expected
    assert sum(len(step.copies) for step in run.steps) == run.counters.cow_copies


def test_counters_add_up() -> None:
    batch = [request(row, 5 + row, n=1 + row % 3, max_tokens=12, ignore_eos=True) for row in range(6)]
    run = fake_run(batch, num_blocks=18, num_swap_blocks=40)
    computed = sum(step.num_tokens for step in run.steps)
    counters = run.counters
    assert counters.preemptions_recompute > 0
    assert counters.preemptions_swap > 0
    assert counters.prompt_tokens == sum(len(each.prompt_token_ids) for each in batch)
    assert counters.output_tokens == sum(output.num_output_tokens for output in run.outputs.values())
    # The last token of an output is never computed, nor the first of a sibling's a second time.
    decoded = sum(len(o.token_ids) - 1 for output in run.outputs.values() for o in output.outputs)
    assert computed == counters.prompt_tokens + decoded + counters.recomputed_tokens
    assert counters.swapped_out_blocks == sum(len(step.swap_out) for step in run.steps)
    assert counters.swapped_in_blocks == sum(len(step.swap_in) for step in run.steps)
    swapped = [snapshot.pool.swapped for snapshot in run.snapshots]
    assert max(len(step.swap_out) for step in run.steps) <= max(swapped) <= 40
    assert swapped[-1] == 0


@pytest.mark.parametrize("prompt", [1, 2, 3, 4])
def test_a_sample_depends_on_its_index_and_not_on_the_others(prompt: int) -> None:
    five, two = (fake_run([request(0, prompt, n=n, max_tokens=50)]).outputs[0].outputs for n in (5, 2))
    assert [output.index for output in five] == [0, 1, 2, 3, 4]
    assert len({len(output.token_ids) for output in five}) > 1, "they should not end together"
    assert five[:2] == two


@pytest.mark.parametrize("num_blocks", range(11, 16))
def test_a_group_whose_blocks_all_still_stand_draws_at_once(monkeypatch: pytest.MonkeyPatch, num_blocks: int) -> None:
    """Two equal samples, dropped and admitted again, find every block but that of their last token in the cache."""
    monkeypatch.setattr("fake_runs.VOCABULARY", 1)
    batch = [request(0, 1, max_tokens=6, ignore_eos=True), request(1, 1, n=2, max_tokens=6, ignore_eos=True)]
    run = fake_run(batch, num_blocks=num_blocks, block_size=1, preemption="recompute")
    assert all(output.error is None for output in run.outputs.values())


class LoggingRunner(FakeRunner):
    """Says of each drawn token that it, and the one before it in the vocabulary, were the likeliest."""

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        drawn = super().execute(step)
        samples = [
            each._replace(top_logprobs=[[(token, -1.0), (token - 1, -2.0)] for token in each.token_ids])
            for each in drawn.samples
        ]
        return replace(drawn, samples=samples)


@pytest.mark.parametrize("n", [1, 3])
def test_each_token_keeps_its_own_top_logprobs(n: int) -> None:
    """Also in the first step, which draws all samples at once, and in the last."""
    runner = LoggingRunner(60, 4, vocab_size=VOCABULARY)
    run = fake_run([request(0, 6, n=n, max_tokens=8, logprobs=2, ignore_eos=True)], num_blocks=60, runner=runner)
    outputs = run.outputs[0].outputs
    assert [len(output.token_ids) for output in outputs] == [8] * n
    for output in outputs:
        assert output.top_logprobs == [[(token, -1.0), (token - 1, -2.0)] for token in output.token_ids]

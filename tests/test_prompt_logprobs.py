"""How likely a prompt was: equal to Hugging Face's log_softmax, whatever the chunks, the cache and preemption."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Run, hf_model, run_engine, tokenizer
from fake_runs import fake_engine, fake_run
from hypothesis import given
from hypothesis import strategies as st

from pagedbatch.model.prompt_logprobs import score_prompts
from pagedbatch.model.torch_sampling import TorchSamplingOps
from pagedbatch.params import GenerationParams
from pagedbatch.sequence import Request
from pagedbatch.step import PromptScores, PromptTask

TOP = 3


def prompts() -> list[list[int]]:
    """Of one token and more, on both sides of a block's end; some begin alike for longer than a block."""
    rng = random.Random(5)
    prefix = [1] + [rng.randrange(4, 256) for _ in range(40)]
    lengths = [1, 2, 15, 16, 17, 33, 120]
    apart = [[1] + [rng.randrange(4, 256) for _ in range(length - 1)] for length in lengths]
    return apart + [prefix + [rng.randrange(4, 256) for _ in range(length)] for length in (0, 5, 30)]


@cache
def hf_logprobs(path: Path, prompt: tuple[int, ...]) -> torch.Tensor:
    """[len(prompt) - 1, vocab_size]: what each position says about the next token."""
    with torch.inference_mode():
        logits = hf_model(path)(torch.tensor([prompt])).logits[0, :-1]
    return logits.float().log_softmax(-1)


def assert_right(path: Path, prompt: list[int], scores: PromptScores | None, top: int = TOP) -> None:
    assert scores is not None
    expected = hf_logprobs(path, tuple(prompt))
    assert scores.logprobs == pytest.approx(
        expected.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist(), abs=1e-4
    )
    best = expected.topk(top)
    assert len(scores.top_logprobs) == len(prompt) - 1
    for found, token_ids, logprobs in zip(
        scores.top_logprobs, best.indices.tolist(), best.values.tolist(), strict=True
    ):
        assert [token_id for token_id, _ in found] == token_ids
        assert [logprob for _, logprob in found] == pytest.approx(logprobs, abs=1e-4)


def assert_all_right(path: Path, run: Run) -> None:
    for row, prompt in enumerate(prompts()):
        assert_right(path, prompt, run.outputs[row].prompt_scores)


def requests(**params: Any) -> list[Request]:
    settings = GenerationParams(prompt_logprobs=TOP, **params)
    return [Request(row, prompt, settings, row) for row, prompt in enumerate(prompts())]


@pytest.mark.parametrize("params", [{}, {"n": 3, "temperature": 1.0}, {"num_beams": 3}, {"max_tokens": 0}], ids=str)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_scored_tokens": 7},
        {"max_num_scored_tokens": 1, "max_num_batched_tokens": 50},
        {"max_num_batched_tokens": 16, "max_num_seqs": 5},
        {"prefix_cache": False},
    ],
    ids=str,
)
def test_prompt_logprobs_are_those_of_hf(
    rand_model_path: Path, params: dict[str, Any], settings: dict[str, Any]
) -> None:
    run = run_engine(rand_model_path, requests(**{"max_tokens": 4, **params}), **settings)
    assert_all_right(rand_model_path, run)


def test_they_change_no_output(rand_model_path: Path) -> None:
    params: dict[str, Any] = {"n": 2, "temperature": 1.0, "max_tokens": 8}
    plain = [Request(row, prompt, GenerationParams(**params), row) for row, prompt in enumerate(prompts())]
    run = run_engine(rand_model_path, requests(**params), max_num_scored_tokens=10)
    assert run.token_ids() == run_engine(rand_model_path, plain).token_ids()


@pytest.mark.parametrize(
    "settings", [{"preemption": "recompute"}, {"preemption": "swap", "num_swap_blocks": 99}], ids=str
)
def test_preemption_is_invisible(rand_model_path: Path, settings: dict[str, Any]) -> None:
    params = {"n": 4, "temperature": 1.0, "max_tokens": 40, "ignore_eos": True}
    run = run_engine(rand_model_path, requests(**params), num_blocks=24, max_num_scored_tokens=5, **settings)
    assert run.counters.preemptions_recompute + run.counters.preemptions_swap > 0
    assert_all_right(rand_model_path, run)


def test_a_prompt_that_stands_in_the_cache_is_scored_all_the_same(rand_model_path: Path) -> None:
    """The same prompt three times: the second asks for logprobs, the third does not and may use what stands there."""
    prompt = prompts()[6]
    rows = [
        Request(row, prompt, GenerationParams(max_tokens=4, prompt_logprobs=top), row)
        for row, top in enumerate([None, TOP, None])
    ]
    run = run_engine(rand_model_path, rows, max_num_seqs=1)
    assert_right(rand_model_path, prompt, run.outputs[1].prompt_scores)
    assert [run.outputs[row].num_cached_tokens > 0 for row in range(3)] == [False, False, True]
    assert run.outputs[0].prompt_scores is None
    assert len({str(token_ids) for token_ids in run.token_ids().values()}) == 1


def test_how_many(rand_model_path: Path) -> None:
    prompt = prompts()[3]
    rows = [Request(k, prompt, GenerationParams(max_tokens=1, prompt_logprobs=k), k) for k in (0, 1, 100)]
    found = run_engine(rand_model_path, rows).outputs
    for k, result in found.items():
        assert_right(rand_model_path, prompt, result.prompt_scores, top=k)


def test_raw_whatever_the_controls(rand_model_path: Path) -> None:
    controls: dict[str, Any] = {"repetition_penalty": 2.0, "bad_words": ((9,),), "logprobs_mode": "processed"}
    run = run_engine(rand_model_path, requests(max_tokens=2, temperature=0.3, top_k=2, **controls))
    assert_all_right(rand_model_path, run)


def test_no_step_holds_more_logits_than_it_may(rand_model_path: Path) -> None:
    run = fake_run([Request(i, [1] * 90, GenerationParams(prompt_logprobs=1, max_tokens=3)) for i in range(4)],
                   max_num_scored_tokens=32)  # fmt: skip
    per_step = [sum(len(task.targets) for task in step.prompts) for step in run.steps]
    assert max(per_step) == 32
    assert sum(per_step) == 4 * 89


# --- nothing to generate ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [{"n": 1}, {"n": 3, "temperature": 1.0}, {"num_beams": 3, "n": 2}], ids=str)
@pytest.mark.parametrize("prompt_logprobs", [None, 2])
@pytest.mark.parametrize("prompt_len", [1, 2, 40])
def test_no_new_token(params: dict[str, Any], prompt_logprobs: int | None, prompt_len: int) -> None:
    settings = GenerationParams(max_tokens=0, prompt_logprobs=prompt_logprobs, logprobs=1, **params)
    neighbour = Request(1, [5, 6, 7], GenerationParams(max_tokens=3, ignore_eos=True))
    run = fake_run([Request(0, list(range(prompt_len)), settings), neighbour], max_num_scored_tokens=16)
    result = run.outputs[0]
    assert [(output.index, output.token_ids, output.cumulative_logprob) for output in result.outputs] == [
        (i, [], 0.0) for i in range(settings.n)
    ]
    assert {(output.finish_reason, output.stop_reason) for output in result.outputs} == {("length", None)}
    assert [output.top_logprobs for output in result.outputs] == [[]] * settings.n
    if prompt_logprobs is not None:
        assert result.prompt_scores is not None
        assert len(result.prompt_scores.logprobs) == prompt_len - 1
    assert len(run.outputs[1].outputs[0].token_ids) == 3


def test_nothing_to_compute_takes_no_block() -> None:
    engine = fake_engine()
    engine.add(Request(0, [1] * 50, GenerationParams(max_tokens=0)))
    assert engine.engine.has_unfinished
    (result,) = engine.step()
    assert result.num_prompt_tokens == 50
    assert not engine.engine.has_unfinished
    assert not engine.steps


@given(
    rows=st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 4), st.sampled_from([None, 0, 2]), st.integers(0, 6)),
        min_size=1,
        max_size=6,
    ),
    settings=st.fixed_dictionaries(
        {
            "num_blocks": st.integers(36, 60),
            "num_swap_blocks": st.sampled_from([0, 40]),
            "max_num_seqs": st.sampled_from([2, 50]),
            "max_num_batched_tokens": st.sampled_from([5, 2048]),
            "max_num_scored_tokens": st.sampled_from([1, 4, 1000]),
            "prefix_cache": st.booleans(),
        }
    ),
)
def test_any_mix_of_rows_gives_what_it_gives_alone(
    rows: list[tuple[int, int, int | None, int]], settings: dict[str, Any]
) -> None:
    mixed = [
        Request(i, [(j % 7) + 1 for j in range(length)],
                GenerationParams(n=n, temperature=1.0, prompt_logprobs=top, max_tokens=max_tokens))
        for i, (length, n, top, max_tokens) in enumerate(rows)
    ]  # fmt: skip
    together = fake_run(mixed, **settings)
    for each in mixed:
        alone = fake_run([each])
        assert together.answers()[each.request_id] == alone.answers()[each.request_id]
        assert together.outputs[each.request_id].prompt_scores == alone.outputs[each.request_id].prompt_scores


def test_logits_that_are_not_numbers() -> None:
    logits = torch.randn(5, 40)
    logits[3, 7] = float("nan")
    right, wrong = score_prompts(
        logits, [PromptTask(0, 0, [1, 2], 1), PromptTask(1, 0, [1, 2, 3], 1)], TorchSamplingOps()
    )
    assert right.error is None
    assert right.logprobs == pytest.approx(logits[:2].log_softmax(-1)[[0, 1], [1, 2]].tolist())
    assert wrong.error is not None


def test_prompts_of_stories(stories_path: Path) -> None:
    prompt = tokenizer(stories_path)("Once upon a time there was a little dog named Tim.").input_ids
    run = run_engine(stories_path, [Request(0, prompt, GenerationParams(max_tokens=0, prompt_logprobs=TOP))])
    assert_right(stories_path, prompt, run.outputs[0].prompt_scores)

"""The same tokens, beams and scores as Hugging Face's `generate` on the same weights, in float32."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from engines import hf_beams, hf_greedy, run_engine, tokenizer

from pagedbatch.params import GenerationParams
from pagedbatch.sequence import Request

SCORE_TOLERANCE = 1e-4


def random_prompts(count: int, longest: int, seed: int, vocab: tuple[int, int] = (4, 256)) -> list[list[int]]:
    rng = random.Random(seed)
    return [[1] + [rng.randrange(*vocab) for _ in range(rng.randrange(longest))] for _ in range(count)]


def assert_beams_equal_hf(path: Path, prompts: list[list[int]], params: GenerationParams, **hf: object) -> None:
    run = run_engine(path, [Request(i, prompt, params) for i, prompt in enumerate(prompts)])
    for i, prompt in enumerate(prompts):
        expected = hf_beams(path, prompt, params, **hf)
        outputs = run.outputs[i].outputs
        assert [o.token_ids for o in outputs] == [token_ids for token_ids, _ in expected], f"prompt {i}"
        for output, (_, score) in zip(outputs, expected, strict=True):
            assert output.score == pytest.approx(score, abs=SCORE_TOLERANCE, rel=1e-5)


def test_greedy_equals_hf(rand_model_path: Path) -> None:
    prompts = random_prompts(24, longest=70, seed=1)
    params = GenerationParams(max_tokens=48)
    run = run_engine(rand_model_path, [Request(i, prompt, params) for i, prompt in enumerate(prompts)])
    expected = {i: [hf_greedy(rand_model_path, prompt, 48)] for i, prompt in enumerate(prompts)}
    assert run.token_ids() == expected


def test_long_prompts_in_chunks_equal_hf(rand_model_path: Path) -> None:
    prompts = [*random_prompts(4, longest=400, seed=2), [1] + [9, 8, 7] * 120]
    params = GenerationParams(max_tokens=16)
    requests = [Request(i, prompt, params) for i, prompt in enumerate(prompts)]
    run = run_engine(rand_model_path, requests, max_num_batched_tokens=33)
    assert max(s.num_tokens for s in run.snapshots) <= 33
    assert run.token_ids() == {i: [hf_greedy(rand_model_path, prompt, 16)] for i, prompt in enumerate(prompts)}


#: (length_penalty, early_stopping) -> hypotheses of prompt "a" with 3 beams and 8 new tokens, worked out on paper.
TABLE = {
    (0.0, False): [("cfgh", -1.4324), ("", -1.6095), ("b", -1.6096)],
    (1.0, False): [("cfgh", -0.2865), ("bdefgh", -0.3905), ("befgh", -0.4265)],
    (1.0, True): [("cfgh", -0.2865), ("b", -0.8048), ("", -1.6095)],
    (2.0, False): [("bdefgh", -0.0558), ("cfgh", -0.0573), ("befgh", -0.0711)],
    (2.0, True): [("cfgh", -0.0573), ("b", -0.4024), ("", -1.6095)],
    (-1.0, False): [("", -1.6095), ("b", -3.2191), ("cfgh", -7.1622)],
}
TABLE |= {(penalty, "never"): TABLE[penalty, False] for penalty in (0.0, 1.0, 2.0, -1.0)}
TABLE |= {(penalty, True): TABLE[penalty, False] for penalty in (0.0, -1.0)}


@pytest.mark.parametrize(("length_penalty", "early_stopping"), TABLE)
def test_beams_on_the_table_model(table_model_path: Path, length_penalty: float, early_stopping: bool | str) -> None:
    params = GenerationParams(
        num_beams=3, n=3, max_tokens=8, length_penalty=length_penalty, early_stopping=early_stopping
    )
    encode = tokenizer(table_model_path)
    run = run_engine(table_model_path, [Request(0, encode("a").input_ids, params)])
    outputs = run.outputs[0].outputs
    found = [(encode.decode(o.token_ids, skip_special_tokens=True), round(o.score or 0, 4)) for o in outputs]
    assert found == TABLE[length_penalty, early_stopping]
    for output in outputs:
        assert output.score == pytest.approx(
            output.cumulative_logprob / len(output.token_ids) ** length_penalty, abs=1e-6
        )
        assert sum(output.token_logprobs) == pytest.approx(output.cumulative_logprob, abs=1e-4)


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
def test_beams_equal_hf(rand_model_path: Path, length_penalty: float, early_stopping: bool | str) -> None:
    """Two end tokens, so that more candidates are looked at; some searches end early, some at the limit."""
    params = GenerationParams(
        num_beams=4, n=4, max_tokens=30, length_penalty=length_penalty, early_stopping=early_stopping
    )
    assert_beams_equal_hf(rand_model_path, random_prompts(4, longest=40, seed=3), params)


@pytest.mark.parametrize(("num_beams", "n"), [(2, 1), (3, 2), (8, 8)])
def test_beam_widths_equal_hf(rand_model_path: Path, num_beams: int, n: int) -> None:
    params = GenerationParams(num_beams=num_beams, n=n, max_tokens=24)
    assert_beams_equal_hf(rand_model_path, random_prompts(3, longest=40, seed=4), params)


@pytest.mark.parametrize(
    ("controls", "hf_controls"),
    [
        ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
        ({"no_repeat_ngram_size": 2}, {"no_repeat_ngram_size": 2}),
        ({"min_tokens": 12}, {"min_new_tokens": 12}),
        ({"logit_bias": ((9, 6.0), (20, -4.0))}, {"sequence_bias": [[[9], 6.0], [[20], -4.0]]}),
    ],
)
@pytest.mark.parametrize("num_beams", [1, 3])
def test_controls_equal_hf(
    rand_model_path: Path, num_beams: int, controls: dict[str, object], hf_controls: dict[str, object]
) -> None:
    prompts = random_prompts(3, longest=30, seed=5)
    params = GenerationParams(num_beams=num_beams, n=num_beams, max_tokens=20, **controls)
    if num_beams > 1:
        assert_beams_equal_hf(rand_model_path, prompts, params, **hf_controls)
    else:
        run = run_engine(rand_model_path, [Request(i, prompt, params) for i, prompt in enumerate(prompts)])
        expected = {i: [hf_greedy(rand_model_path, p, 20, **hf_controls)] for i, p in enumerate(prompts)}
        assert run.token_ids() == expected


STORIES = ("Once upon a time", "Tom and Lily went to the park. They saw a")


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
def test_beams_on_a_trained_model_equal_hf(
    stories_path: Path, length_penalty: float, early_stopping: bool | str
) -> None:
    prompts = [tokenizer(stories_path)(text).input_ids for text in STORIES]
    for num_beams in (4, 8):
        params = GenerationParams(
            num_beams=num_beams,
            n=num_beams,
            max_tokens=50,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
        )
        assert_beams_equal_hf(stories_path, prompts, params)


@pytest.mark.parametrize("num_beams", [4, 8])
def test_long_beams_on_a_trained_model_equal_hf(stories_path: Path, num_beams: int) -> None:
    params = GenerationParams(num_beams=num_beams, n=num_beams, max_tokens=200, early_stopping="never")
    assert_beams_equal_hf(stories_path, [tokenizer(stories_path)(STORIES[num_beams == 8]).input_ids], params)

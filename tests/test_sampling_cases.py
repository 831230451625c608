"""Sampling, logprobs, penalties and stops as people meet them, on models whose answers can be worked out."""

from __future__ import annotations

import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from engines import Run, run_engine, tokenizer

from pagedbatch.engine.stopping import StopChecker
from pagedbatch.outputs import CompletionOutput
from pagedbatch.params import GenerationParams
from pagedbatch.sequence import Request, TokenNode


def run_text(
    path: Path, text: str, *, rng_key: int = 7, max_num_seqs: int = 128, **params: Any
) -> list[CompletionOutput]:
    request = Request(0, tokenizer(path)(text).input_ids, GenerationParams(**params), rng_key)
    return run_engine(path, [request], max_num_seqs=max_num_seqs).outputs[0].outputs


def texts(path: Path, outputs: list[CompletionOutput]) -> list[str]:
    return [tokenizer(path).decode(output.token_ids, skip_special_tokens=True) for output in outputs]


def random_prompts(count: int, longest: int) -> list[list[int]]:
    rng = random.Random(count)
    return [[1] + [rng.randrange(4, 256) for _ in range(rng.randrange(longest))] for _ in range(count)]


# --- samples ---------------------------------------------------------------------------------------------------------


def test_samples_are_not_copies_of_one(table_model_path: Path) -> None:
    """Four equal odds."""

    def four_hundred() -> list[str]:
        outputs = run_text(table_model_path, "t", n=400, temperature=1.0, max_tokens=1, max_num_seqs=400)
        return texts(table_model_path, outputs)

    drawn = four_hundred()
    counts = Counter(drawn)
    assert set(counts) == set("uvwx")
    assert all(70 <= count <= 130 for count in counts.values())
    assert four_hundred() == drawn


def test_another_key_gives_other_samples(table_model_path: Path) -> None:
    one, other = (run_text(table_model_path, "t", n=50, temperature=1.0, max_tokens=1, rng_key=key) for key in (1, 2))
    assert texts(table_model_path, one) != texts(table_model_path, other)


def test_many_samples_of_a_row_and_many_rows_have_one_distribution(table_model_path: Path) -> None:
    count, first = 2000, {"b": 0.5, "c": 0.3, "": 0.2}
    ids = tokenizer(table_model_path)("a").input_ids
    group = GenerationParams(n=count, temperature=1.0, max_tokens=1)
    single = GenerationParams(temperature=1.0, max_tokens=1)
    together = run_engine(table_model_path, [Request(0, ids, group, 5)], max_num_seqs=count, num_blocks=count + 8)
    apart = run_engine(
        table_model_path, [Request(i, ids, single, 1000 + i) for i in range(count)], max_num_seqs=count, num_blocks=4000
    )
    for outputs in (
        together.outputs[0].outputs,
        [output for result in apart.outputs.values() for output in result.outputs],
    ):
        counts = Counter(texts(table_model_path, outputs))
        assert sum(counts.values()) == count
        for text, share in first.items():
            assert counts[text] / count == pytest.approx(share, abs=0.04)


@pytest.mark.parametrize("max_num_seqs", [1, 8])
def test_greedy_does_not_depend_on_the_batch(rand_model_path: Path, max_num_seqs: int) -> None:
    params = GenerationParams(max_tokens=12, logprobs=0)
    requests = [Request(i, prompt, params) for i, prompt in enumerate(random_prompts(64, longest=40))]
    assert_same(
        run_engine(rand_model_path, requests, max_num_seqs=max_num_seqs),
        run_engine(rand_model_path, requests, max_num_seqs=64),
    )


def assert_same(run: Run, expected: Run) -> None:
    assert run.token_ids() == expected.token_ids()
    for row, result in run.outputs.items():
        for output, wanted in zip(result.outputs, expected.outputs[row].outputs, strict=True):
            assert output.token_logprobs == pytest.approx(wanted.token_logprobs, abs=1e-4)


def test_prefix_cache_hits_give_the_same_answers(rand_model_path: Path) -> None:
    params = GenerationParams(max_tokens=12, logprobs=1)
    prompts = random_prompts(20, longest=90) * 3
    requests = [Request(i, prompt, params) for i, prompt in enumerate(prompts)]
    hits = run_engine(rand_model_path, requests, max_num_seqs=10)
    assert hits.counters.prefix_hit_tokens > 0
    assert_same(hits, run_engine(rand_model_path, requests, max_num_seqs=10, prefix_cache=False))
    ids = hits.token_ids()
    assert all(ids[i] == ids[i + 20] == ids[i + 40] for i in range(20))


# --- logprobs and penalties ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.5, "top_p": 0.9}, {"temperature": 2.0, "top_k": 2}])
def test_logprobs_are_raw(table_model_path: Path, settings: dict[str, Any]) -> None:
    b, c = tokenizer(table_model_path)("bc").input_ids
    outputs = run_text(table_model_path, "a", max_tokens=1, logprobs=2, **settings)
    assert outputs[0].top_logprobs is not None
    best = outputs[0].top_logprobs[0]
    assert [token_id for token_id, _ in best] == [b, c]
    assert [logprob for _, logprob in best] == pytest.approx([math.log(0.5), math.log(0.3)], abs=1e-4)
    assert outputs[0].cumulative_logprob == pytest.approx(dict(best)[outputs[0].token_ids[0]])


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("logprobs", [0, 100])
def test_how_many_logprobs(table_model_path: Path, num_beams: int, logprobs: int) -> None:
    """T has 64 tokens: fewer than may be asked for."""
    outputs = run_text(table_model_path, "a", max_tokens=4, num_beams=num_beams, n=num_beams, logprobs=logprobs)
    for output in outputs:
        assert output.top_logprobs is not None
        assert [len(top) for top in output.top_logprobs] == [min(logprobs, 64)] * len(output.token_ids)


def test_repetition_penalty_counts_the_prompt_and_presence_penalty_does_not(table_model_path: Path) -> None:
    """After "ba" comes b, unless the b of the prompt counts."""
    assert texts(table_model_path, run_text(table_model_path, "ba", max_tokens=1)) == ["b"]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"repetition_penalty": 5.0}, "c"),
        ({"presence_penalty": 5.0}, "b"),
        ({"frequency_penalty": 5.0}, "b"),
    ]
    for settings, first in cases:
        outputs = run_text(table_model_path, "ba", max_tokens=1, **settings)
        assert texts(table_model_path, outputs) == [first]


def test_presence_penalty_counts_the_output(table_model_path: Path) -> None:
    """z is followed by z, until it counts: then y, as the odds of y are e**-7 of those of z."""
    assert texts(table_model_path, run_text(table_model_path, "z", max_tokens=4)) == ["zzzz"]
    outputs = run_text(table_model_path, "z", max_tokens=4, presence_penalty=7.5)
    assert texts(table_model_path, outputs) == ["zyzz"]
    assert outputs[0].token_logprobs[1] == pytest.approx(math.log(0.001), abs=1e-2)


# --- stops -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stop", "completed_by", "matched"),
    [
        (("gh",), "fgh", "gh"),
        (("h", "gh"), "fgh", "gh"),  # the first match in the text, not in the list
        (("fgh",), "fgh", "fgh"),
        (("f",), "f", "f"),
        (("zz",), "fgh", None),
    ],
)
def test_stop_strings_across_tokens(
    table_model_path: Path, stop: tuple[str, ...], completed_by: str, matched: str | None
) -> None:
    output = run_text(table_model_path, "c", stop=stop, max_tokens=20)[0]
    assert texts(table_model_path, [output]) == [completed_by]
    assert output.finish_reason == "stop"
    assert output.stop_reason == (2 if matched is None else matched)


def test_stop_strings_end_beams(table_model_path: Path) -> None:
    outputs = run_text(table_model_path, "a", num_beams=3, n=3, max_tokens=8, stop=("fg",))
    found = texts(table_model_path, outputs)
    assert any(text.endswith("fg") for text in found)
    for text, output in zip(found, outputs, strict=True):
        assert "fg" not in text[:-2]
        assert output.stop_reason == ("fg" if text.endswith("fg") else 2)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_stop_token_ids(table_model_path: Path, num_beams: int) -> None:
    g = tokenizer(table_model_path)("g").input_ids[0]
    outputs = run_text(table_model_path, "c", num_beams=num_beams, n=num_beams, stop_token_ids=(g,), max_tokens=9)
    assert outputs[0].token_ids[-1] == g
    assert outputs[0].stop_reason == g


def test_stop_characters_of_several_tokens(rand_model_path: Path) -> None:
    """One token a byte: a character is there with its last byte, and not before."""
    encode = tokenizer(rand_model_path)
    text = "é中文😀"
    ids = encode(text, add_special_tokens=False).input_ids
    assert len(ids) == len(text.encode())
    stops = StopChecker(frozenset(), lambda ids, skip: str(encode.decode(ids, skip_special_tokens=skip)))
    for i, character in enumerate(text):
        params = GenerationParams(stop=(character,), max_tokens=99)
        tail: TokenNode | None = None
        completed = []
        for place, token_id in enumerate(ids):
            if stops.check(params, tail, token_id) is not None:
                completed.append(place)
                break
            tail = TokenNode(token_id, 0.0, tail)
        assert completed == [len(text[: i + 1].encode()) - 1]

"""Diverse beam search against a dense transcription of the one that transformers had, and on paper."""

from __future__ import annotations

import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from engines import hf_model, run_engine, tokenizer
from fake_runs import FakeRun, fake_run, request
from group_search import group_beam_search
from hypothesis import given
from hypothesis import strategies as st

from pagedbatch.engine.beam_search import diversify, num_candidates
from pagedbatch.output.records import RecordWriter
from pagedbatch.outputs import CompletionOutput
from pagedbatch.params import GenerationParams
from pagedbatch.sequence import Request
from pagedbatch.step import BeamResult

#: Logprob of tokens that the table model leaves out of a row: which of them comes first is not defined.
RARE = math.log(1e-5)


def run_one(path: Path, prompt: list[int], **params: Any) -> list[CompletionOutput]:
    return run_engine(path, [Request(0, prompt, GenerationParams(**params))]).outputs[0].outputs


def assert_equals_reference(path: Path, prompt: list[int], eos_token_ids: set[int], **params: Any) -> None:
    expected = group_beam_search(hf_model(path), prompt, GenerationParams(**params), eos_token_ids)
    outputs = run_one(path, prompt, **params)
    for output, (token_ids, score) in zip(outputs, expected, strict=True):
        if min(output.token_logprobs) > RARE:
            assert output.token_ids == token_ids
        assert output.score == pytest.approx(score, abs=1e-4, rel=1e-5)
        assert sum(output.token_logprobs) == pytest.approx(output.cumulative_logprob, abs=1e-4)
        length = len(output.token_ids)
        assert output.score == pytest.approx(output.cumulative_logprob / length ** params["length_penalty"], abs=1e-6)


EARLY_STOPPING: list[bool | str] = [False, True, "never"]


@pytest.mark.parametrize("early_stopping", EARLY_STOPPING)
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("diversity_penalty", [0.0, 0.5, 5.0])
def test_equals_the_reference_where_searches_end_early(
    table_model_path: Path, diversity_penalty: float, length_penalty: float, early_stopping: bool | str
) -> None:
    prompt = tokenizer(table_model_path)("a").input_ids
    for num_beams, num_beam_groups in ((4, 2), (6, 3), (6, 2)):
        assert_equals_reference(
            table_model_path,
            prompt,
            {2},
            num_beams=num_beams,
            n=num_beams,
            max_tokens=8,
            num_beam_groups=num_beam_groups,
            diversity_penalty=diversity_penalty,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
        )


@pytest.mark.parametrize(("num_beams", "num_beam_groups"), [(4, 2), (4, 4), (6, 2), (8, 4)])
@pytest.mark.parametrize("diversity_penalty", [0.3, 1.0, 4.0])
def test_equals_the_reference_where_the_context_counts(
    rand_model_path: Path, num_beams: int, num_beam_groups: int, diversity_penalty: float
) -> None:
    rng = random.Random(num_beams)
    assert_equals_reference(
        rand_model_path,
        [1] + [rng.randrange(4, 256) for _ in range(rng.randrange(5, 30))],
        {2, 3},
        num_beams=num_beams,
        n=num_beams,
        max_tokens=14,
        num_beam_groups=num_beam_groups,
        diversity_penalty=diversity_penalty,
        length_penalty=1.0,
    )


def test_one_group_is_plain_beam_search(rand_model_path: Path) -> None:
    settings = {"num_beams": 4, "n": 4, "max_tokens": 20}
    plain = run_one(rand_model_path, [1, 50, 60], **settings)
    assert run_one(rand_model_path, [1, 50, 60], num_beam_groups=1, diversity_penalty=0.0, **settings) == plain


def test_groups_take_other_tokens(table_model_path: Path) -> None:
    """After t come four letters of equal odds: plain beams need them too, groups of one must take turns."""
    prompt = tokenizer(table_model_path)("t").input_ids
    settings = {"num_beams": 4, "n": 4, "max_tokens": 1, "num_beam_groups": 4, "diversity_penalty": 0.5}
    outputs = run_one(table_model_path, prompt, **settings)
    assert {tokenizer(table_model_path).decode(output.token_ids) for output in outputs} == set("uvwx")
    assert [output.score for output in outputs] == pytest.approx([-1.3863] * 4, abs=1e-3)


def test_equal_groups_give_each_text_once(table_model_path: Path) -> None:
    prompt = tokenizer(table_model_path)("a").input_ids
    plain = run_one(table_model_path, prompt, num_beams=2, n=2, max_tokens=8)
    equal = run_one(table_model_path, prompt, num_beams=4, n=4, max_tokens=8, num_beam_groups=2, diversity_penalty=0.0)
    assert [o.token_ids for o in equal] == [o.token_ids for o in plain]
    assert [o.score for o in equal] == [o.score for o in plain]


def test_stop_strings_and_controls_end_and_shape_the_beams_of_groups(table_model_path: Path) -> None:
    prompt = tokenizer(table_model_path)("a").input_ids
    settings = {"num_beams": 4, "n": 4, "max_tokens": 8, "num_beam_groups": 2, "diversity_penalty": 0.5}
    outputs = run_one(table_model_path, prompt, stop=("fg",), min_tokens=2, repetition_penalty=1.1, **settings)
    texts = [tokenizer(table_model_path).decode(o.token_ids, skip_special_tokens=True) for o in outputs]
    assert any(text.endswith("fg") for text in texts)
    for text, output in zip(texts, outputs, strict=True):
        assert "fg" not in text[:-2]
        assert output.stop_reason == ("fg" if text.endswith("fg") else 2)
        assert len(output.token_ids) >= 2


@given(
    num_rows=st.integers(1, 4),
    wanted=st.integers(1, 8),
    penalty=st.sampled_from([0.25, 1.0, 10.0]),
    data=st.data(),
)
def test_the_best_after_the_penalty_are_among_the_candidates(
    num_rows: int, wanted: int, penalty: float, data: st.DataObject
) -> None:
    vocab_size = 12
    quarters = st.lists(st.integers(-40, 0).map(lambda q: q / 4), min_size=vocab_size, max_size=vocab_size)
    dense = [data.draw(quarters) for _ in range(num_rows)]
    taken = Counter(data.draw(st.lists(st.integers(0, vocab_size - 1), max_size=5)))
    everything = sorted(
        ((score, row, token) for row, scores in enumerate(dense) for token, score in enumerate(scores)), reverse=True
    )
    seen = everything[: num_candidates(1, 0, wanted - 2 + taken.total() * num_rows)]
    scores, rows, tokens = ([entry[i] for entry in seen] for i in range(3))
    result = BeamResult([int(row) for row in rows], [int(token) for token in tokens], scores, [-1.0] * len(seen))
    best = diversify(result, taken, penalty, wanted)
    lowered = sorted((score - penalty * taken[token] for score, _, token in everything), reverse=True)
    assert best.scores == lowered[:wanted]
    for parent, token, score, logprob in zip(best.parents, best.token_ids, best.scores, best.logprobs, strict=True):
        assert score == dense[parent][token] - penalty * taken[token]
        assert logprob == -1.0 - penalty * taken[token]


def fake_answers(**settings: Any) -> FakeRun:
    rows = [
        request(i, 3 + i, num_beams=6, n=6, num_beam_groups=groups, diversity_penalty=1.0, max_tokens=12)
        for i, groups in enumerate((2, 3, 6, 2, 3, 6, 2, 3))
    ]
    return fake_run(rows, **settings)


@pytest.mark.parametrize("settings", [{"num_swap_blocks": 100, "preemption": "swap"}, {"preemption": "recompute"}])
def test_preemption_is_invisible(settings: dict[str, Any]) -> None:
    run = fake_answers(num_blocks=27, max_num_seqs=24, **settings)
    assert run.counters.preemptions_swap + run.counters.preemptions_recompute > 1
    assert run.answers() == fake_answers().answers()


def test_the_record_says_that_groups_found_the_same(table_model_path: Path) -> None:
    encode = tokenizer(table_model_path)
    params = GenerationParams(num_beams=4, n=4, max_tokens=8, num_beam_groups=2, diversity_penalty=0.0)
    row = Request(0, encode("a").input_ids, params)
    record = RecordWriter(encode).ok_record("a", run_engine(table_model_path, [row]).outputs[0], row)
    assert record["note"] == "only 2 of 4 outputs: the groups of beams found no other ones"

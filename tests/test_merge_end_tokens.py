"""Beams that differ in their end token alone: one with `merge_end_tokens`, and always as items of a catalog."""

from __future__ import annotations

import itertools
import json
import string
from pathlib import Path
from typing import Any

import platformdirs
import pytest
from constrained_runs import assert_same_ranking, encode, exhaustive, ranked
from engines import run_engine
from fake_runs import fake_run
from fake_runs import request as fake_request
from hypothesis import given
from hypothesis import strategies as st
from models import BOS, EOS, EOT
from workplace import run_rows

from pagedbatch.engine.beam_search import merge_ends
from pagedbatch.params import GenerationParams
from pagedbatch.sequence import Request
from pagedbatch.step import BeamResult

CAPITALS = [
    *("Paris", "London", "Berlin", "Rome", "Madrid", "Vienna", "Prague", "Warsaw", "Athens", "Lisbon", "Dublin"),
    *("Oslo", "Helsinki", "Stockholm", "Budapest", "Moscow", "Tokyo", "Beijing", "Cairo", "Ottawa"),
]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5))))
def test_a_parents_first_end_stays_and_everything_that_is_no_end(candidates: list[tuple[int, int]]) -> None:
    result = BeamResult(
        parents=[parent for parent, _ in candidates],
        token_ids=[token_id for _, token_id in candidates],
        scores=[-float(i) for i in range(len(candidates))],
        logprobs=[-float(i) for i in range(len(candidates))],
    )
    merged = merge_ends(result, {4, 5})
    expected = [
        (parent, token_id, -float(i))
        for i, (parent, token_id) in enumerate(candidates)
        if token_id < 4 or not any(other == parent and end >= 4 for other, end in candidates[:i])
    ]
    assert list(zip(merged.parents, merged.token_ids, merged.scores, strict=True)) == expected
    assert merged.logprobs == merged.scores


def test_an_item_of_a_catalog_comes_once_with_its_likeliest_end(rand_model_path: Path, tmp_path: Path) -> None:
    """As many beams as items find all of them, in the order of Hugging Face's scores."""
    items = ["yes", "no", "nobody", "n", "é中😀", *string.ascii_lowercase[:7]]
    prompt = "is it?"
    (record,) = run_rows(
        rand_model_path,
        tmp_path,
        [{"prompt": prompt, "allowed_outputs": items, "num_beams": 12, "n": 12, "max_tokens": 40}],
    )
    encoded = [encode(rand_model_path, text) for text in items]
    prompt_ids = [BOS, *encode(rand_model_path, prompt)]
    both = exhaustive(rand_model_path, prompt_ids, [(*item, end) for item in encoded for end in (EOS, EOT)])
    best = {item: max((EOS, EOT), key=lambda end: both[(*item, end)]) for item in encoded}
    expected = ranked({(*item, end): both[(*item, end)] for item, end in best.items()}, 1.0)
    assert [tuple(output["token_ids"]) for output in record["outputs"]] == [ids for ids, _ in expected]
    scores = [output["score"] for output in record["outputs"]]
    assert scores == pytest.approx([score for _, score in expected], abs=1e-4)
    assert len({output["text"] for output in record["outputs"]}) == 12
    assert {EOS, EOT} == set(best.values())  # or the test shows little


def test_own_stop_tokens_are_ends_of_an_item_too(table_model_path: Path, tmp_path: Path) -> None:
    (record,) = run_rows(
        table_model_path,
        tmp_path,
        [{"prompt": "a", "allowed_outputs": ["b", "c"], "num_beams": 4, "n": 4, "stop_token_ids": [7, 8]}],
    )
    assert [output["text"] for output in record["outputs"]] == ["b", "c"]
    assert record["note"] == "only 2 of 4 outputs: no more are possible"


def test_twenty_capitals_on_the_demo_model(tmp_path: Path) -> None:
    """Case 62."""
    demo = platformdirs.user_cache_path("pagedbatch") / "models" / "SmolLM2-135M-Instruct"
    if not demo.is_dir():
        pytest.skip("the demo model is not here: `make demo` fetches it")
    model = tmp_path / "model"
    model.mkdir()
    for file in demo.iterdir():
        (model / file.name).symlink_to(file)
    (model / "generation_config.json").unlink()
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0], "bos_token_id": 1}))
    items = [f" {name}" for name in CAPITALS]
    row = {"prompt": "The capital of France is", "allowed_outputs": items, "num_beams": 20, "n": 20}
    (record,) = run_rows(model, tmp_path, [row])
    assert sorted(output["text"] for output in record["outputs"]) == sorted(items)
    assert record["outputs"][0]["text"] == " Paris"
    assert {output["stop_reason"] for output in record["outputs"]} <= {0, 2}


def _texts(outputs: list[Any], ends: set[int]) -> list[tuple[int, ...]]:
    return [tuple(i for i in output.token_ids if i not in ends) for output in outputs]


@pytest.mark.parametrize("settings", [{}, {"num_beam_groups": 3, "diversity_penalty": 0.3}], ids=["plain", "diverse"])
def test_any_beams_when_asked(settings: dict[str, Any]) -> None:
    """A vocabulary of eleven tokens, three of which end: nearly every search finds one text with several ends."""
    stops, found_twice = {7, 8}, 0
    for row in range(12):
        asked = {"num_beams": 6, "n": 6, "max_tokens": 5, "stop_token_ids": tuple(stops), **settings}
        ends = {*stops, 0}
        plain = fake_run([fake_request(row, 6, **asked)]).outputs[row].outputs
        merged = fake_run([fake_request(row, 6, **asked, merge_end_tokens=True)]).outputs[row].outputs
        found_twice += len(set(_texts(plain, ends))) < len(plain)
        assert len(set(_texts(merged, ends))) == len(merged)
    assert found_twice > 1


def test_as_many_beams_as_texts_find_them_all(rand_model_path: Path) -> None:
    """Four letters, up to three of them: every text once, those that end with the likelier of two ends."""
    letters, prompt = encode(rand_model_path, "abcd"), [BOS, *encode(rand_model_path, "what is")]
    texts = [text for length in range(4) for text in itertools.product(letters, repeat=length)]
    whole = [text for text in texts if len(text) == 3]
    ended = [text for text in texts if len(text) < 3]
    sums = exhaustive(rand_model_path, prompt, whole + [(*text, end) for text in ended for end in (EOS, EOT)])
    best = [max(((*text, end) for end in (EOS, EOT)), key=sums.__getitem__) for text in ended]
    params = GenerationParams(
        num_beams=len(texts),
        n=len(texts),
        max_tokens=3,
        allowed_token_ids=(EOS, EOT, *letters),
        early_stopping="never",
        merge_end_tokens=True,
    )
    run_of_beams = run_engine(rand_model_path, [Request(0, prompt, params)])
    expected = ranked({output: sums[output] for output in [*whole, *best]}, 1.0)
    assert_same_ranking(run_of_beams.outputs[0].outputs, expected)
    assert {output[-1] for output in best} == {EOS, EOT}  # or the test shows little

"""What a row may ask for: every refusal names the field, and the strongest layer that speaks wins."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedbatch.engine.beam_search import length_penalised
from pagedbatch.errors import ParamError
from pagedbatch.params import MAX_LENGTH_PENALTY, READERS, GenerationParams, resolve
from pagedbatch.wording import short

WRONG_TYPES: list[tuple[str, Any]] = [
    *((name, value) for name in ("n", "num_beams", "seed", "max_tokens", "top_k") for value in (True, "3", 2.0, [1])),
    *((name, value) for name in ("temperature", "top_p", "length_penalty") for value in (True, "0.5", [1.0], {"a": 1})),
    *(("temperature", value) for value in (float("nan"), float("inf"), 10**400)),
    *(("stop", value) for value in (3, "", ["a", ""], [1], {"a": 1})),
    *(("stop_token_ids", value) for value in ("3", [1.0], [True], True, -1, [-1])),
    *(("logit_bias", value) for value in ([1], {"a": 1.0}, {"1": "x"}, {"-1": 1.0}, {1.5: 1.0}, {"1": float("inf")})),
    *(("ignore_eos", value) for value in (1, "true")),
    *(("logprobs", value) for value in (True, 1.0, "1")),
    *(("bad_words", value) for value in (3, "", ["a", ""], [[]], [1], {"a": 1}, [["a"]], [[-1]])),
    *(("allowed_token_ids", value) for value in ([], "3", [1.5], -1)),
    *(("truncate_prompt", value) for value in (True, "top", 5)),
    *((name, value) for name in ("add_bos", "system_to_user", "include_stop") for value in (1, "true")),
    *(("logprobs_mode", value) for value in (1, "Raw", ["raw"])),
    *(("early_stopping", value) for value in (1, "sometimes", [True])),
]

OUT_OF_BOUNDS: list[tuple[str, Any]] = [
    *((name, value) for name in ("n", "num_beams") for value in (0, -1)),
    ("max_tokens", -1),
    *(("prompt_logprobs", value) for value in (-1, 101)),
    ("temperature", -0.1),
    *(("best_of", value) for value in (0, -1)),
    ("sample_index", -1),
    *(("top_p", value) for value in (0, 1.01, -1)),
    ("top_k", -2),
    *(("min_p", value) for value in (-0.1, 1.1)),
    *(("min_tokens", value) for value in (-1, 10_000)),
    *(("logprobs", value) for value in (-1, 101)),
    *(("repetition_penalty", value) for value in (0, -1.0)),
    ("no_repeat_ngram_size", -1),
    *(("length_penalty", value) for value in (-400, 400)),
    ("num_beam_groups", 0),
    ("diversity_penalty", -0.5),
    *((name, value) for name in ("n", "best_of", "num_beams") for value in (2**16 + 1, 10**7, 10**9, 2**64)),
    *(
        (name, value)
        for name in ("sample_index", "top_k", "max_tokens", "min_tokens", "no_repeat_ngram_size")
        for value in (2**63, 10**30)
    ),
    *(("seed", value) for value in (2**129, -(2**129), 1 << 100_000)),
    *((name, value) for name in ("temperature", "repetition_penalty") for value in (1e7, 1e300, 10**400)),
    *(("repetition_penalty", value) for value in (1e-7, 1e-300)),
    *(
        (name, sign * value)
        for name in ("presence_penalty", "frequency_penalty")
        for sign in (1, -1)
        for value in (1e10, 1e308, 10**400)
    ),
    *(("diversity_penalty", value) for value in (1e10, 1e308)),
    *(("length_penalty", value) for value in (32.5, -33, 1e308)),
    *(("logit_bias", {"1": value}) for value in (1e308, -1e308, 2e9, 10**400)),
    ("logit_bias", {"7": 1, "07": 2}),
    *((name, [2**31]) for name in ("stop_token_ids", "allowed_token_ids")),
    ("logit_bias", {str(2**40): 1}),
    ("logit_bias", {"9" * 5000: 1}),
    ("bad_words", [[2**31]]),
    ("bad_words", ["a"] * (2**16 + 1)),
    ("bad_words", ["a" * 5000]),
    ("bad_words", [[1] * 5000]),
    ("stop", ["a"] * 1025),
    ("stop", "a" * 5000),
]


@pytest.mark.parametrize(("name", "value"), WRONG_TYPES + OUT_OF_BOUNDS, ids=lambda v: short(v)[:20])
def test_a_refusal_names_the_field(name: str, value: Any) -> None:
    with pytest.raises(ParamError, match=rf"^{name}\b"):
        resolve({}, {name: value})


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("n", 10**9, "n must be at most 65536, got 1000000000"),
        ("best_of", 10**7, "best_of must be at most 65536, got 10000000"),
        ("sample_index", 2**64, r"sample_index must be at most 2\*\*63 - 1, got 18446744073709551616"),
        ("top_k", 1e30, r"top_k must be an integer, got 1e\+30"),
        ("top_p", 0, "top_p must be above 0, got 0"),
        ("seed", 1 << 100_000, r"seed must be at most 2\*\*128, got a value of type int that is too large to show"),
        ("stop", "a" * 5000, "stop takes entries of at most 4096 characters or tokens, got 'aaa"),
        ("logit_bias", {"5": 1e308}, r"logit_bias of token 5 must be at most 1e\+09, got 1e\+308"),
    ],
    ids=lambda value: short(value)[:20],
)
def test_a_refusal_names_the_bound(name: str, value: Any, words: str) -> None:
    with pytest.raises(ParamError, match=f"^{words}") as refusal:
        resolve({}, {name: value})
    assert len(str(refusal.value)) < 200


@pytest.mark.parametrize(
    "layer",
    [
        {"n": 2**16},
        {"num_beams": 2**16, "n": 2**16},
        {"sample_index": 2**63 - 1, "n": 5},
        {"top_k": 2**63 - 1},
        {"seed": 2**128},
        {"seed": -(2**64)},
        {"max_tokens": 10**12},
        {"temperature": 1e-300},
        {"temperature": 1_000_000},
        {"logit_bias": {"1": -1e9, "2": 100}},
        {"repetition_penalty": 100},
        {"length_penalty": -32},
    ],
    ids=str,
)
def test_what_makes_sense_lies_within_the_bounds(layer: dict[str, Any]) -> None:
    params = resolve({}, layer)
    assert {name: dict(getattr(params, name)) if name == "logit_bias" else getattr(params, name) for name in layer} == {
        name: {int(k): v for k, v in value.items()} if name == "logit_bias" else value for name, value in layer.items()
    }


def test_a_score_over_any_length_is_finite_at_the_largest_length_penalty() -> None:
    for penalty in (-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY):
        assert math.isfinite(length_penalised(-1e9, 2**31, penalty))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


@given(st.dictionaries(st.sampled_from(sorted(READERS)), json_values, max_size=3))
def test_any_value_is_taken_or_refused_in_words(layer: dict[str, Any]) -> None:
    refusal = None
    try:
        hash(resolve({}, layer))
    except ParamError as error:
        refusal = str(error)
    assert refusal is None or any(name in refusal for name in layer)


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("stop", "ab", ("ab",)),
        ("stop", ["ab", "c"], ("ab", "c")),
        ("stop", [], ()),
        ("stop_token_ids", 5, (5,)),
        ("stop_token_ids", [5, 6], (5, 6)),
        ("logit_bias", {"7": 1, 3: -2.5}, ((3, -2.5), (7, 1.0))),
        ("bad_words", "ab", ("ab",)),
        ("bad_words", ["ab", [5, 6], [7]], ("ab", (5, 6), (7,))),
        ("allowed_token_ids", [9, 5, 9], (5, 9)),
        ("logprobs", False, None),
        ("logprobs", 0, 0),
        ("temperature", 1, 1.0),
        ("top_k", -1, -1),
        ("early_stopping", "Never", "never"),
        ("early_stopping", "true", True),
        ("early_stopping", False, False),
    ],
)
def test_values_are_read(name: str, value: Any, read: Any) -> None:
    assert getattr(resolve({}, {name: value}), name) == read


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        ({"num_beams": 2, "n": 3}, "n 3 is above num_beams 2"),
        ({"num_beams": 2, "temperature": 0.5}, "temperature 0.5 can't be combined with num_beams 2"),
        ({"n": 2, "temperature": 0}, "n 2 with temperature 0"),
        ({"best_of": 2, "temperature": 0}, "best_of 2 with temperature 0"),
        ({"n": 3, "best_of": 2}, "best_of 2 is below n 3"),
        ({"num_beams": 3, "best_of": 3}, "best_of 3 can't be combined with num_beams 3"),
        ({"num_beams": 3, "sample_index": 3}, "sample_index 3 can't be combined with num_beams 3"),
        ({"num_beams": 5, "num_beam_groups": 2, "diversity_penalty": 1}, "num_beams 5 can't be split into"),
        ({"num_beam_groups": 2, "diversity_penalty": 1}, "num_beams 1 can't be split into num_beam_groups 2"),
        ({"num_beams": 4, "num_beam_groups": 2}, "num_beam_groups 2 without a diversity_penalty"),
        ({"num_beams": 4, "diversity_penalty": 0.5}, "diversity_penalty 0.5 has no meaning for one group of beams"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens 5 is above max_tokens 4"),
    ],
)
def test_what_cannot_be_combined(layer: dict[str, Any], words: str) -> None:
    with pytest.raises(ParamError, match=words):
        resolve({}, layer)


def test_the_defaults_are_greedy() -> None:
    assert resolve({}) == GenerationParams()
    assert GenerationParams().temperature == 0


def test_the_last_layer_that_speaks_wins() -> None:
    params = resolve({"top_k": 1, "top_p": 0.5, "min_p": 0.1}, {"top_k": 2, "top_p": 0.6}, {"top_k": 3, "top_p": None})
    assert (params.top_k, params.top_p, params.min_p) == (3, 0.6, 0.1)


@pytest.mark.parametrize(
    ("model", "asked", "temperature"),
    [
        ({}, {}, 0.0),
        ({}, {"n": 2}, 1.0),
        ({}, {"best_of": 2}, 1.0),
        ({}, {"n": 2, "temperature": 0.3}, 0.3),
        ({"temperature": 0.7}, {}, 0.7),
        ({"temperature": 0.7}, {"n": 4}, 0.7),
        ({"temperature": 0.7}, {"temperature": 0}, 0.0),
        ({"temperature": 0.7}, {"num_beams": 4}, 0.0),
        ({"temperature": 0.7}, {"num_beams": 4, "n": 4}, 0.0),
        ({}, {"num_beams": 4, "n": 4}, 0.0),
    ],
)
def test_the_temperature_that_nobody_gave(model: dict[str, Any], asked: dict[str, Any], temperature: float) -> None:
    assert resolve(model, asked).temperature == temperature


@pytest.mark.parametrize(
    ("layer", "width", "uses_beams"),
    [({}, 1, False), ({"n": 3}, 3, False), ({"n": 3, "best_of": 5}, 5, False), ({"num_beams": 4, "n": 2}, 4, True)],
)
def test_width(layer: dict[str, int], width: int, uses_beams: bool) -> None:
    params = resolve({}, layer)
    assert (params.width, params.use_beam_search) == (width, uses_beams)


@pytest.mark.parametrize(
    ("layer", "reads"),
    [
        ({}, False),
        ({"temperature": 1.0, "logit_bias": {"1": 2}}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": -0.1}, True),
        ({"no_repeat_ngram_size": 2}, True),
        ({"bad_words": [[5], [6]]}, False),
        ({"bad_words": [[5], [6, 7]]}, True),
    ],
)
def test_who_needs_the_history(layer: dict[str, Any], reads: bool) -> None:
    assert resolve({}, layer).reads_history == reads


def test_stop_strings_are_bounded() -> None:
    many = [f"s{i}" for i in range(1025)]
    assert len(resolve({}, {"stop": many[1:]}).stop) == 1024
    with pytest.raises(ParamError, match="stop takes at most 1024 entries, got 1025"):
        resolve({}, {"stop": many})

"""What a row may ask for: every refusal names the field, and the strongest layer that speaks wins."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedbatch.errors import ParamError
from pagedbatch.params import READERS, GenerationParams, resolve

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
]


@pytest.mark.parametrize(("name", "value"), WRONG_TYPES + OUT_OF_BOUNDS, ids=lambda v: repr(v)[:20])
def test_a_refusal_names_the_field(name: str, value: Any) -> None:
    with pytest.raises(ParamError, match=rf"^{name}\b"):
        resolve({}, {name: value})


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
    many = [f"s{i}" for i in range(1001)]
    assert len(resolve({}, {"stop": many[1:]}).stop) == 1000
    with pytest.raises(ParamError, match="stop lists 1001 strings, and 1000 are the most"):
        resolve({}, {"stop": many})

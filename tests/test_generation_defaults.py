"""A model's generation_config: what it sets counts by default, gives way to what is asked, or is named as left out."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import GenerationConfig

from pagedbatch.model.generation_defaults import GenerationDefaults, check_generation_config, read_generation_defaults
from pagedbatch.params import GenerationParams, resolve

LIMIT = 100


def taken(**settings: Any) -> GenerationDefaults:
    return read_generation_defaults(GenerationConfig(**settings), LIMIT)


def test_nothing_said_nothing_taken() -> None:
    assert taken() == GenerationDefaults()
    assert taken(eos_token_id=[2, 3], pad_token_id=0, use_cache=True, do_sample=False) == GenerationDefaults()


@pytest.mark.parametrize("groups", [1, 2, 3, 2**16])
def test_a_number_of_beam_groups_is_not_refused_for_what_is_checked_beside_it(groups: int) -> None:
    check_generation_config({"num_beam_groups": groups}, "generation_config.json")


@pytest.mark.parametrize(
    ("said", "field", "value"),
    [
        ({"repetition_penalty": 1.2}, "repetition_penalty", 1.2),
        ({"no_repeat_ngram_size": 3}, "no_repeat_ngram_size", 3),
        ({"max_new_tokens": 77}, "max_tokens", 77),
        ({"min_new_tokens": 7}, "min_tokens", 7),
        ({"num_beams": 4}, "num_beams", 4),
        ({"num_beams": 4, "length_penalty": 0.6}, "length_penalty", 0.6),
        ({"num_beams": 4, "early_stopping": True}, "early_stopping", True),
        ({"num_beams": 4, "early_stopping": "never"}, "early_stopping", "never"),
        ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}, "num_beam_groups", 2),
        ({"bad_words_ids": [[5], [6, 7]]}, "bad_words", ((5,), (6, 7))),
        ({"bad_words_ids": [[6, 7]], "suppress_tokens": [8, 9]}, "bad_words", ((6, 7), (8,), (9,))),
        ({"stop_strings": ["x"]}, "stop", ("x",)),
        ({"do_sample": True, "temperature": 0.7}, "temperature", 0.7),
        ({"do_sample": True, "top_k": 9}, "top_k", 9),
    ],
    ids=str,
)
def test_what_is_taken_over(said: dict[str, Any], field: str, value: Any) -> None:
    defaults = taken(**said)
    assert getattr(resolve(defaults.values), field) == value
    assert defaults.left_out == ()


def test_sampling_counts_only_where_the_model_samples() -> None:
    assert taken(do_sample=False, temperature=0.7).values == {}


@pytest.mark.parametrize(
    ("said", "left_out"),
    [
        ({"typical_p": 0.9, "guidance_scale": 1.5}, ("typical_p", "guidance_scale")),
        ({"typical_p": 1.0, "guidance_scale": None, "renormalize_logits": False}, ()),
        ({"forced_eos_token_id": [0, 1]}, ("forced_eos_token_id",)),
        ({"begin_suppress_tokens": [5]}, ("begin_suppress_tokens",)),
        ({"do_sample": True, "num_return_sequences": 3}, ("num_return_sequences",)),
        ({"max_length": LIMIT - 1}, ("max_length",)),
        ({"max_length": LIMIT - 1, "max_new_tokens": 5}, ()),  # which wins in Hugging Face too
        ({"max_length": LIMIT}, ()),
        ({"do_sample": True, "num_beams": 3, "temperature": 0.5}, ("do_sample with num_beams",)),
    ],
    ids=str,
)
def test_what_has_no_counterpart_is_named(said: dict[str, Any], left_out: tuple[str, ...]) -> None:
    assert taken(**said).left_out == left_out


@pytest.mark.parametrize(
    ("defaults", "asked", "expected"),
    [
        ({"num_beams": 4}, {"temperature": 0.8}, {"num_beams": 1, "temperature": 0.8}),
        (
            {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
            {"temperature": 0.8},
            {"num_beam_groups": 1},
        ),
        ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}, {"num_beams": 3}, {"num_beam_groups": 1}),
        ({"num_beams": 4}, {"n": 8}, {"num_beams": 1, "temperature": 1.0}),
        ({"num_beams": 4}, {"best_of": 3}, {"num_beams": 1, "temperature": 1.0}),
        ({"num_beams": 4}, {"n": 3}, {"num_beams": 4, "temperature": 0.0}),
        ({"num_beams": 4}, {"temperature": 0.0}, {"num_beams": 4}),
        ({"temperature": 0.6, "top_p": 0.9}, {"num_beams": 4}, {"num_beams": 4, "temperature": 0.0, "top_p": 1.0}),
        ({"temperature": 0.6, "top_p": 0.9}, {"num_beams": 1}, {"temperature": 0.6, "top_p": 0.9}),
        ({"min_tokens": 9}, {"max_tokens": 3}, {"min_tokens": 3, "max_tokens": 3}),
        ({"min_tokens": 9}, {"max_tokens": 0}, {"min_tokens": 0, "max_tokens": 0}),
        ({"max_tokens": 9}, {"min_tokens": 12}, {"min_tokens": 12, "max_tokens": 12}),
    ],
    ids=str,
)
def test_defaults_give_way(defaults: dict[str, Any], asked: dict[str, Any], expected: dict[str, Any]) -> None:
    params: GenerationParams = resolve(defaults, asked)
    assert {name: getattr(params, name) for name in expected} == expected

"""What rows ask for by any tool's names: the same fields of ours, or the row's own error; never a traceback."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from field_strategies import KEYS, VALUES
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig

from pagedbatch.errors import RowError
from pagedbatch.input.fields.field_table import BUNDLES, HARMLESS, KNOWN, LACKED, OPTIONS, SYNONYMS
from pagedbatch.input.fields.row_fields import read_fields
from pagedbatch.input.openai_batch import CHAT_URL, plain_fields
from pagedbatch.input.requests import ModelLimits, PromptBuilder
from pagedbatch.input.row import RawRow, place_row
from pagedbatch.params import GenerationParams

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


@pytest.fixture(scope="module")
def builder(rand_model_path: Path) -> PromptBuilder:
    """Byte-level, with a chat template."""
    return _builder(rand_model_path)


def _builder(path: Path, *, run: Any = (), defaults: Any = (), **options: Any) -> PromptBuilder:
    from transformers import AutoTokenizer

    limits = ModelLimits(max_model_len=40, vocab_size=272)
    tokenizer = AutoTokenizer.from_pretrained(path)
    return PromptBuilder(tokenizer, limits, model_defaults=dict(defaults), run_settings=dict(run), **options)


def _params(builder: PromptBuilder, **fields: Any) -> GenerationParams:
    return builder.request(place_row(RawRow({"prompt": "a", **fields}, line=1), 0)).params


def _refusal(given: dict[str, Any], *, strict: bool = False) -> str:
    with pytest.raises(RowError) as refused:
        read_fields(given, strict=strict)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"max_new_tokens": 5}, {"max_tokens": 5}),
        ({"max_completion_tokens": 5}, {"max_tokens": 5}),
        ({"max_tokens": 5, "max_new_tokens": 5}, {"max_tokens": 5}),
        ({"max_tokens": None, "max_new_tokens": 5}, {"max_tokens": 5}),
        ({"num_return_sequences": 3}, {"n": 3}),
        ({"stop_sequences": ["x"]}, {"stop": ["x"]}),
        ({"stop_strings": "x", "stop": ["x"]}, {"stop": ["x"]}),
        ({"min_new_tokens": 2}, {"min_tokens": 2}),
        ({"bad_words_ids": [[5], [6, 7]]}, {"bad_words": [[5], [6, 7]]}),
        ({"suppress_tokens": [5, 6]}, {"bad_words": [[5], [6]]}),
        ({"include_stop_str_in_output": True}, {"include_stop": True}),
        ({"add_special_tokens": False}, {"add_bos": False}),
        ({"add_special_tokens": True}, {}),
        ({"logprobs": True, "top_logprobs": 3}, {"logprobs": 3}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": False, "top_logprobs": 0}, {"logprobs": False}),
        ({"logprobs": 2}, {"logprobs": 2}),
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "json_object"}}, {"json_schema": {"type": "object"}}),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"json_schema": SCHEMA}),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
         {"json_schema": SCHEMA}),
        ({"response_format": json.dumps({"type": "json_schema", "json_schema": {"schema": SCHEMA}})},
         {"json_schema": SCHEMA}),
        ({"response_format": {"type": "json", "value": SCHEMA}}, {"json_schema": SCHEMA}),
        ({"response_format": {"type": "regex", "value": "a+"}}, {"regex": "a+"}),
        ({"grammar": {"type": "regex", "value": "a+"}}, {"regex": "a+"}),
        ({"grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
        ({"guided_json": SCHEMA}, {"json_schema": SCHEMA}),
        ({"guided_json": SCHEMA, "json_schema": SCHEMA}, {"json_schema": SCHEMA}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_grammar": "root ::= x"}, {"grammar": "root ::= x"}),
        ({"guided_choice": ["a", "b"]}, {"allowed_outputs": ["a", "b"]}),
        ({"guided_choice": '["a", "b"]'}, {"allowed_outputs": ["a", "b"]}),
        ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": SCHEMA}),
        ({"structured_outputs": {"choice": ["a"], "regex": None}}, {"allowed_outputs": ["a"]}),
        ({"structured_outputs": {"json_object": True, "backend": "xgrammar"}}, {"json_schema": {"type": "object"}}),
        ({"structured_outputs": {}}, {}),
        ({"guided_decoding": {"grammar": "root ::= x"}}, {"grammar": "root ::= x"}),
        ({"tools": TOOLS}, {"tools": TOOLS}),
        ({"tools": json.dumps(TOOLS)}, {"tools": TOOLS}),
        ({"tools": [], "tool_choice": "auto"}, {}),
        ({"tools": TOOLS, "tool_choice": "none"}, {}),
        ({"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}),
        ({"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": False, "x": 1}},
         {"chat_template_kwargs": {"enable_thinking": False, "x": 1}}),
        ({"reasoning_effort": "low"}, {"chat_template_kwargs": {"reasoning_effort": "low"}}),
        ({"chat_template_kwargs": '{"x": 1}'}, {"chat_template_kwargs": {"x": 1}}),
        ({"continue_final_message": True, "add_generation_prompt": False},
         {"continue_final_message": True, "add_generation_prompt": False}),
        ({"documents": [{"text": "x"}]}, {"documents": [{"text": "x"}]}),
        ({"do_sample": True, "temperature": 0.5}, {"temperature": 0.5}),
        ({"do_sample": False, "temperature": 0}, {"temperature": 0}),
        ({"sampling_params": {"n": 2, "max_new_tokens": 5, "top_k": None}}, {"n": 2, "max_tokens": 5}),
        ({"sampling_params": {"n": 2}, "n": 2}, {"n": 2}),
        ({"sampling_params": '{"n": 2}'}, {"n": 2}),
        ({"extra_body": {"enable_thinking": True}}, {"chat_template_kwargs": {"enable_thinking": True}}),
        ({"generation_config": {"do_sample": True, "temperature": 1, "typical_p": 1.0, "use_cache": True}},
         {"temperature": 1}),
    ],
)  # fmt: skip
def test_what_a_key_means_in_a_row_and_in_a_body(given: dict[str, Any], meant: dict[str, Any]) -> None:
    assert read_fields({"prompt": "a", **given, "note": 5}) == {"prompt": "a", **meant}
    assert read_fields(given, strict=True) == meant


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"max_tokens": 5, "max_new_tokens": 6}, "max_tokens and max_new_tokens contradict each other"),
        ({"max_completion_tokens": 5, "max_new_tokens": 6}, "max_completion_tokens and max_new_tokens contradict"),
        ({"n": 2, "sampling_params": {"n": 3}}, "n and sampling_params.n contradict each other"),
        ({"max_new_tokens": "5"}, "max_new_tokens must be an integer, got '5'"),
        ({"stop_sequences": [1]}, "stop_sequences must be a non-empty string or a list of them"),
        ({"sampling_params": "SamplingParams(n=1)"}, "sampling_params must be an object, got"),
        ({"sampling_params": {"sampling_params": {"n": 1}}}, "sampling_params.sampling_params = {'n': 1} is not"),
        ({"sampling_params": {"prompt": "x"}}, "sampling_params.prompt = 'x' is not supported"),
        ({"sampling_params": {"typical_p": 0.5}}, "sampling_params.typical_p = 0.5 is not supported: here there is"),
        ({"sampling_params": {"temprature": 0.5}}, "is not supported: did you mean temperature?"),
        ({"sampling_params": {"logits_processors": ["x"]}}, "here there is logit_bias"),
        ({"top_logprobs": 3}, "top_logprobs needs logprobs true"),
        ({"logprobs": 2, "top_logprobs": 3}, "logprobs and top_logprobs contradict"),
        ({"do_sample": False, "temperature": 0.7}, "do_sample false and temperature 0.7 contradict each other"),
        ({"do_sample": True, "sampling_params": {"temperature": 0}}, "do_sample true and sampling_params.temp"),
        ({"do_sample": "yes"}, "do_sample must be true or false, got 'yes'"),
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_json and guided_regex are given: a row takes one"),
        ({"guided_json": SCHEMA, "json_schema": {}}, "guided_json and json_schema contradict"),
        ({"structured_outputs": {"regex": "a", "json": SCHEMA}}, "structured_outputs holds regex and json_schema"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag = 'x' is not supported"),
        ({"structured_outputs": ["regex"]}, "structured_outputs must be an object"),
        ({"response_format": {"type": "json_schema"}}, "response_format = {'type': 'json_schema'} is not supported"),
        ({"response_format": {"type": ["json"]}}, "is not supported"),
        ({"response_format": "json"}, "response_format must be an object, got 'json'"),
        ({"tools": "hammer"}, "tools must be a list, got 'hammer' (--ignore-columns tools, if the column is data)"),
        ({"tools": ["hammer"]}, "tools must be a list of objects, got ['hammer']"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice = 'required' is not supported"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "a call can't be enforced"),
        ({"enable_thinking": "no"}, "enable_thinking must be true or false, got 'no'"),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
         "enable_thinking and chat_template_kwargs.enable_thinking contradict"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs must be an object, got [1]"),
        ({"continue_final_message": "yes"}, "continue_final_message must be true or false"),
        ({"seed": "abc"}, "seed must be an integer, got 'abc'"),
    ],
)  # fmt: skip
def test_what_a_row_cannot_have(given: dict[str, Any], reason: str) -> None:
    assert reason in _refusal({"prompt": "a", **given})


def test_data_of_such_names_is_no_option() -> None:
    """In a plain row, values that an option never has; in a body every key is one."""
    data = {
        "documents": ["a text"], "thinking": "a long thought", "generation_config": "auto", "prediction": "yes",
        "audio": {"bytes": b"", "path": "x"}, "parameters": {"type": "object", "properties": {}}, "options": ["a"],
        "user": "u", "metadata": {"x": 1}, "model": "m", "url": "u", "stream": "brook", "constraints": ["one"],
    }  # fmt: skip
    assert read_fields({"prompt": "a", **data}) == {"prompt": "a"}
    for name in data.keys() - HARMLESS:
        assert f"{name} " in _refusal({name: data[name]}, strict=True)


def test_do_sample_takes_the_temperature_that_there_is(rand_model_path: Path, builder: PromptBuilder) -> None:
    def temperature(run: Any = (), defaults: Any = (), **fields: Any) -> float:
        return _params(_builder(rand_model_path, run=run, defaults=defaults), **fields).temperature

    assert temperature(do_sample=True) == 1.0
    assert temperature(do_sample=False) == 0.0
    assert temperature(run={"temperature": 0.7}, do_sample=True) == 0.7
    assert temperature(run={"temperature": 0.7}, do_sample=False) == 0.0
    assert temperature(run={"temperature": 0}, do_sample=True) == 1.0
    assert temperature(defaults={"temperature": 0.6}, do_sample=True) == 0.6
    assert temperature(defaults={"temperature": 0.6}, do_sample=False) == 0.0
    assert temperature(do_sample=True, temperature=0.3) == 0.3
    for fields in ({"num_beams": 3}, {"sampling_params": {"num_beams": 3}}):
        with pytest.raises(RowError, match="do_sample true can't be combined with num_beams 3"):
            _params(builder, do_sample=True, **fields)
    with pytest.raises(RowError, match="n 2 with temperature 0"):
        _params(builder, do_sample=False, num_return_sequences=2)


def test_a_rows_synonyms_win_over_the_runs_settings(rand_model_path: Path) -> None:
    builder = _builder(rand_model_path, run={"max_tokens": 9, "n": 2, "logprobs": 4, "temperature": 1.0})
    params = _params(builder, max_new_tokens=3, sampling_params={"n": 4}, logprobs=False)
    assert (params.max_tokens, params.n, params.logprobs) == (3, 4, None)


def test_a_column_that_the_prompt_is_made_of_is_data_but_for_our_own_parameters(rand_model_path: Path) -> None:
    fields = {"tools": "hammer", "max_new_tokens": "few", "reasoning_effort": 5, "max_tokens": 3, "priority": 2}
    builder = _builder(rand_model_path, prompt_template="{tools} {max_new_tokens} {reasoning_effort} {max_tokens}")
    request = builder.request(place_row(RawRow({**fields, "messages": 5, "stop_sequences": "x"}), 0))
    assert (request.params.max_tokens, request.params.stop, request.priority) == (3, ("x",), 2)
    assert len(request.prompt_token_ids) == len("hammer few 5 3") + 1  # BOS


def test_ignored_columns_are_data(builder: PromptBuilder) -> None:
    fields = {"prompt": "a", "n": "three", "id": 1.5, "max_new_tokens": "x", "custom_id": "c", "max_tokens": 3}
    row = place_row(RawRow(fields, line=4), 3, frozenset({"n", "id", "max_new_tokens", "custom_id"}))
    request = builder.request(row)
    assert (row.id, row.reply, request.params.n, request.params.max_tokens) == (3, "plain", 1, 3)
    assert row.fields == fields


def test_every_key_of_hugging_faces_config_is_known() -> None:
    """`constraints` holds Python objects, which no file can; data columns are called so."""
    assert set(GenerationConfig().to_dict()) - KNOWN == {"constraints"}


def test_no_key_means_two_things() -> None:
    tables = [OPTIONS, SYNONYMS.keys(), BUNDLES.keys(), LACKED.keys(), HARMLESS]
    assert sum(map(len, tables)) == len(frozenset().union(*tables))


def _in_batch(fields: dict[str, Any]) -> dict[str, Any]:
    return {"custom_id": "a", "url": CHAT_URL, "body": {"prompt_token_ids": [5], **fields}}


@settings(max_examples=400)
@given(fields=st.dictionaries(KEYS, VALUES, max_size=3))
def test_whatever_a_row_holds_is_a_request_or_its_own_error(builder: PromptBuilder, fields: dict[str, Any]) -> None:
    rows = [{**fields, "prompt": "a"}, _in_batch(fields)]
    for given_fields in rows:
        problem = "line 1: "
        try:
            builder.request(place_row(RawRow(given_fields, line=1), 0))
        except RowError as error:
            problem = str(error)
        assert problem.startswith("line 1: ")
        assert len(problem.splitlines()) == 1


@given(row=st.dictionaries(st.sampled_from(["custom_id", "url", "method", "body"]), VALUES))
def test_whatever_a_batch_row_holds_is_read_or_refused(row: dict[str, Any]) -> None:
    with suppress(RowError):
        assert plain_fields(row).keys() & {"prompt", "messages", "prompt_token_ids"}

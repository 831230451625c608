"""Messages and chat options of rows: read, checked, and brought into the form that templates expect."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pagedbatch.errors import RowError
from pagedbatch.input.chat.messages import checked_messages, with_arguments_as_text, without_nulls
from pagedbatch.input.chat.options import ChatOptions
from pagedbatch.params import GenerationParams, resolve

CALLED = {"role": "assistant", "content": "x"}


def _call(arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "arguments": arguments}}


def test_nulls_that_datasets_adds_are_left_out() -> None:
    given = [
        {"role": "user", "content": "q", "tool_calls": None, "name": None},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {"a": 1, "b": None}}, "custom": None}],
        },
        {"role": "tool", "content": [{"type": "text", "text": "r", "image_url": None}], "tool_call_id": "1"},
        {"role": "assistant", "content": "a", "tool_calls": [], "reasoning_content": "t"},
    ]
    assert checked_messages(given) == [
        {"role": "user", "content": "q"},
        {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "r", "tool_call_id": "1"},
        {"role": "assistant", "content": "a", "reasoning_content": "t"},
    ]


def test_messages_may_be_json_text_as_tables_hold_them() -> None:
    given = [{"role": "user", "content": "é", "name": None}]
    assert checked_messages(json.dumps(given)) == [{"role": "user", "content": "é"}]
    for text in ("", "hello", "[]", '{"role": "user"}', '"[]"', "[1"):
        with pytest.raises(RowError, match=r"^messages must be a list of at least one message, got '"):
            checked_messages(text)


def test_nulls_in_lists_stay() -> None:
    assert without_nulls({"enum": ["a", None], "default": None, "of": [{"x": None}]}) == {
        "enum": ["a", None],
        "of": [{}],
    }


@pytest.mark.parametrize(
    ("arguments", "parsed"),
    [('{"a": [1, null]}', {"a": [1, None]}), ("", {}), (" ", {}), ("null", {}), ({"a": 1}, {"a": 1}), ("{}", {})],
)
def test_arguments_are_parsed(arguments: Any, parsed: Any) -> None:
    nested, flat = _call(arguments), {"name": "f", "arguments": arguments}
    checked = checked_messages([{**CALLED, "tool_calls": [nested, flat]}])
    assert checked[0]["tool_calls"] == [_call(parsed), {"name": "f", "arguments": parsed}]


def test_arguments_as_text_again() -> None:
    checked = checked_messages([{**CALLED, "tool_calls": [_call('{"a":"é"}'), {"name": "f"}]}, CALLED])
    assert with_arguments_as_text(checked) == [{**CALLED, "tool_calls": [_call('{"a": "é"}'), {"name": "f"}]}, CALLED]


@pytest.mark.parametrize(
    ("tool_calls", "reason"),
    [
        ("f()", "messages[1].tool_calls must be a list of objects, got 'f()'"),
        (["f"], "messages[1].tool_calls must be a list of objects, got ['f']"),
        ([_call("{")], "messages[1].tool_calls[0].function.arguments must be a JSON object, got '{'"),
        ([_call({}), _call("[1]")], "messages[1].tool_calls[1].function.arguments must be a JSON object, got [1]"),
        ([{"arguments": 5}], "messages[1].tool_calls[0].arguments must be a JSON object, got 5"),
    ],
)
def test_tool_calls_that_cannot_be_read(tool_calls: Any, reason: str) -> None:
    with pytest.raises(RowError) as refused:
        checked_messages([CALLED, {**CALLED, "tool_calls": tool_calls}])
    assert str(refused.value) == reason


def _options(**fields: Any) -> ChatOptions:
    return ChatOptions.read(fields, resolve({}, {}))


def test_options_of_a_row() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"a": {"type": "string"}, "b": None}}}
    clean = [{"type": "function", "function": {"name": "f", "parameters": {"a": {"type": "string"}}}}]
    assert _options(tools=[tool]).tools == clean
    assert _options(tools='[{"name": "f"}]').tools == [{"name": "f"}]
    assert _options(tools=[], documents=None, chat_template_kwargs={"a": None}) == ChatOptions()
    assert _options(tools="[]").tools is None
    assert _options(chat_template_kwargs={"a": None, "b": False}).variables == {"b": False}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tools": {"name": "f"}}, "tools must be a list of objects, got {'name': 'f'}"),
        ({"tools": ["f"]}, "tools must be a list of objects, got ['f']"),
        ({"tools": [{}]}, "tools must be a list of objects, got [{}]"),
        ({"tools": "f, g"}, "tools must be a list of objects, got 'f, g'"),
        ({"tools": 0}, "tools must be a list of objects, got 0"),
        ({"documents": ["d"]}, "documents must be a list of objects, got ['d']"),
        ({"chat_template_kwargs": ["a"]}, "chat_template_kwargs must be an object, got ['a']"),
        (
            {"chat_template_kwargs": {"messages": []}},
            "chat_template_kwargs: messages can't be set as a template variable",
        ),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs: tokenize can't be set"),
    ],
)
def test_options_that_cannot_be_read(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowError) as refused:
        _options(**fields)
    assert str(refused.value).startswith(reason)


def test_a_turn_is_opened_or_goes_on() -> None:
    def read(**params: Any) -> tuple[bool, bool]:
        options = ChatOptions.read({}, resolve({}, params))
        return options.continue_final_message, options.add_generation_prompt

    assert read() == (False, True)
    assert read(add_generation_prompt=False) == (False, False)
    assert read(continue_final_message=True) == (True, False)
    assert read(continue_final_message=True, add_generation_prompt=False) == (True, False)
    with pytest.raises(RowError, match="can't both be true"):
        read(continue_final_message=True, add_generation_prompt=True)
    assert GenerationParams().opens_assistant_turn

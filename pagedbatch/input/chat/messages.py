"""A row's chat messages and tools, checked and brought into the form that chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from pagedbatch.errors import RowError
from pagedbatch.readers import is_unicode
from pagedbatch.wording import short

Message = dict[str, Any]


def checked_messages(value: Any) -> list[Message]:
    """A row's messages, or the JSON text of them, as tables hold nested values.

    The text parts of each are joined, nulls left out and the arguments of tool calls parsed.
    Nulls stand for keys that are not there: `datasets` gives every message the keys of all others, and templates that
    ask whether a key is there take null for a value.

    Raises:
        RowError: they are not messages, or hold more than text.
    """
    given = value
    if isinstance(value, str):
        with suppress(ValueError):
            value = json.loads(value)
    if not isinstance(value, list) or not value:
        raise RowError(f"messages must be a list of at least one message, got {short(given)}")
    return [_checked_message(f"messages[{i}]", message) for i, message in enumerate(value)]


def _checked_message(place: str, message: Any) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RowError(f"{place} must be an object with a role and a content, got {short(message)}")
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_text_part(place, part) for part in content)
    if content is not None and not isinstance(content, str):
        raise RowError(f"{place}.content must be text, got {short(content)}")
    if not is_unicode(f"{message['role']}{content}"):
        raise RowError(f"{place} holds half of a surrogate pair, which is not Unicode text")
    checked: Message = without_nulls({**message, "content": content})
    if "tool_calls" in checked:
        calls = checked.pop("tool_calls")
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise RowError(f"{place}.tool_calls must be a list of objects, got {short(calls)}")
        if calls:  # templates that ask whether the key is there take an empty list for a call
            checked["tool_calls"] = [_checked_call(f"{place}.tool_calls[{j}]", call) for j, call in enumerate(calls)]
    return checked


def _text_part(place: str, part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise RowError(f"{place}.content: only text parts can be read, got {short(part)}")


def _checked_call(place: str, call: dict[str, Any]) -> dict[str, Any]:
    """A tool call with its arguments as an object, as templates expect them: OpenAI writes them as JSON text."""
    if isinstance(call.get("function"), dict):
        return {**call, "function": _checked_call(f"{place}.function", call["function"])}
    if "arguments" not in call:
        return call
    arguments = call["arguments"]
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except ValueError:
            raise RowError(f"{place}.arguments must be a JSON object, got {short(arguments)}") from None
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise RowError(f"{place}.arguments must be a JSON object, got {short(arguments)}")
    return {**call, "arguments": arguments}


def with_arguments_as_text(messages: list[Message]) -> list[Message]:
    """The same messages with the arguments of tool calls as JSON text, for templates that expect it (DeepSeek's)."""

    def as_text(call: dict[str, Any]) -> dict[str, Any]:
        if isinstance(call.get("function"), dict):
            return {**call, "function": as_text(call["function"])}
        if "arguments" in call:
            return {**call, "arguments": json.dumps(call["arguments"], ensure_ascii=False)}
        return call

    return [
        {**message, "tool_calls": [as_text(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def with_empty_contents(messages: list[Message]) -> list[Message]:
    """The same messages with an empty content where there is none, for templates that join it to the tool calls."""
    return [{**message, "content": message.get("content", "")} for message in messages]


def without_nulls(value: Any) -> Any:
    """A value of JSON without the keys, at any depth, that hold null. Nulls in lists stay."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def with_role(messages: list[Message], role: str, new_role: str) -> list[Message]:
    """The same chat with another name for a role."""
    return [{**message, "role": new_role} if message["role"] == role else message for message in messages]


def fold_system(messages: list[Message]) -> list[Message]:
    """The same chat without system messages: their text begins the first user message, with an empty line between."""
    system = [message.get("content", "") for message in messages if message["role"] == "system"]
    others = [message for message in messages if message["role"] != "system"]
    if not system:
        return messages
    for i, message in enumerate(others):
        if message["role"] == "user":
            others[i] = {**message, "content": "\n\n".join([*system, message.get("content", "")])}
            return others
    return [{"role": "user", "content": "\n\n".join(system)}, *others]

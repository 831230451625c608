"""Finds what a chat template dropped: messages and tool calls that leave no trace in the text.

Most templates drop by role. So the first chat of a shape is rendered once with marks in place of all that is said, and
what is missing is suspected in every chat of that shape; so is what does not stand in the text as it was written. What
is suspected is put to the test: it left a trace if the text is another one when it is changed. Templates may thus trim,
quote, move and cut a message, such as the thoughts of earlier turns.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pagedbatch.input.chat.messages import Message

MARK = "Zq7xMark"
_MAX_SHAPES = 1024

Render = Callable[[list[Message]], str]


@dataclass(frozen=True, slots=True)
class Part:
    """What a message says: its content, or one of its tool calls. Of one with calls the content may be left out."""

    message: int
    call: int | None = None


class Traces:
    """Remembers what templates drop from chats of each shape."""

    def __init__(self) -> None:
        self._dropped: OrderedDict[Hashable, frozenset[Part]] = OrderedDict()

    def first_lost(self, template: Hashable, messages: list[Message], text: str, render: Render) -> Part | None:
        """The first part of `messages` that changes nothing in `text`, which `render` made of them; None if all do.

        Args:
            template: whatever decides, beside the messages, what is dropped.
        """
        parts = list(_parts(messages))
        dropped = self._dropped_from(template, messages, parts, render)
        suspects = [part for part in parts if part in dropped or not _stands_in(text, _said(messages, part))]
        if not suspects:
            return None
        with suppress(Exception):
            changed = render(_marked(messages, suspects, keep=True))
            suspects = [part for part, mark in zip(suspects, _marks(), strict=False) if mark not in changed]
        for part in suspects:
            with suppress(Exception):  # a template that raises has looked at it
                if render(_marked(messages, [part], keep=True)) == text:
                    return part
        return None

    def _dropped_from(
        self, template: Hashable, messages: list[Message], parts: list[Part], render: Render
    ) -> frozenset[Part]:
        shape = [(message["role"], message.get("content", "").strip() != "", len(_calls(message)))
                 for message in messages]  # fmt: skip
        key = (template, hash(tuple(shape)))  # a long chat's shape is large; a wrong one only makes suspects
        found = self._dropped.pop(key, None)
        if found is None:
            found = frozenset()
            with suppress(Exception):
                text = render(_marked(messages, parts, keep=False))
                found = frozenset(part for part, mark in zip(parts, _marks(), strict=False) if mark not in text)
            if len(self._dropped) >= _MAX_SHAPES:
                self._dropped.popitem(last=False)
        self._dropped[key] = found
        return found


def names_missing(tools: list[dict[str, Any]], text: str) -> Iterator[int]:
    """The tools whose name does not stand in `text`."""
    for i, tool in enumerate(tools):
        name = _function(tool).get("name")
        if not isinstance(name, str) or not _stands_in(text, name):
            yield i


def _parts(messages: list[Message]) -> Iterator[Part]:
    for i, message in enumerate(messages):
        if message.get("content", "").strip() and not _calls(message):
            yield Part(i)
        for j, call in enumerate(_calls(message)):
            if isinstance(_function(call).get("name"), str):
                yield Part(i, j)


def _calls(message: Message) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = message.get("tool_calls", [])
    return calls


def _function(call: dict[str, Any]) -> dict[str, Any]:
    """Where a tool, or a call of one, keeps its name."""
    function = call.get("function")
    return function if isinstance(function, dict) else call


def _said(messages: list[Message], part: Part) -> str:
    message = messages[part.message]
    said: str = message["content"] if part.call is None else _function(_calls(message)[part.call])["name"]
    return said


def _stands_in(text: str, said: str) -> bool:
    said = said.strip()
    return said in text or json.dumps(said, ensure_ascii=False)[1:-1] in text


def _marks() -> Iterator[str]:
    """One for each part; none is the beginning of another."""
    number = 0
    while True:
        yield f"{MARK}{number}x"
        number += 1


def _marked(messages: list[Message], parts: Iterable[Part], *, keep: bool) -> list[Message]:
    """The messages with a mark in place of each of the parts, or, to `keep` what they say, before and behind it.

    On both sides, as templates cut contents at either end.
    """
    changed = list(messages)
    for part, mark in zip(parts, _marks(), strict=False):
        message = changed[part.message]
        new = f"{mark}{_said(messages, part)}{mark}" if keep else mark
        if part.call is None:
            changed[part.message] = {**message, "content": new}
        else:
            calls = list(_calls(message))
            calls[part.call] = _renamed(calls[part.call], new)
            changed[part.message] = {**message, "tool_calls": calls}
    return changed


def _renamed(call: dict[str, Any], name: str) -> dict[str, Any]:
    if isinstance(call.get("function"), dict):
        return {**call, "function": {**call["function"], "name": name}}
    return {**call, "name": name}

"""What a row says about how its chat is rendered, beside the messages: tools, documents, template variables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pagedbatch.errors import RowError
from pagedbatch.input.chat.messages import without_nulls
from pagedbatch.params import GenerationParams
from pagedbatch.wording import short

#: Variables of every template that have a key of their own in a row, and parameters of `apply_chat_template`.
RESERVED_VARIABLES = frozenset({
    "messages", "conversation", "tools", "documents", "add_generation_prompt", "continue_final_message",
    "chat_template", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens", "strftime_now",
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """How a chat is rendered. `variables` are the row's own template variables.

    With `continue_final_message` the last message is left open; else `add_generation_prompt` opens an assistant's turn.
    """

    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    continue_final_message: bool = False
    add_generation_prompt: bool = True

    @classmethod
    def read(cls, fields: Mapping[str, Any], params: GenerationParams) -> ChatOptions:
        """The options of a row.

        Raises:
            RowError: one has a wrong type.
        """
        return cls(
            tools=_objects("tools", fields.get("tools")),
            documents=_objects("documents", fields.get("documents")),
            variables=_variables(fields.get("chat_template_kwargs")),
            continue_final_message=params.continue_final_message,
            add_generation_prompt=params.opens_assistant_turn,
        )


def refuse_chat_options(fields: Mapping[str, Any]) -> None:
    """Refuses what a row without a chat asks of one. `documents` is left alone: it is a common name of a data column.

    Raises:
        RowError: it names the key.
    """
    for name in ("tools", "chat_template_kwargs", "continue_final_message", "add_generation_prompt"):
        if without_nulls(fields.get(name)):
            raise RowError(f"{name} is for chats, and this row has none: give messages, or wrap prompts with --chat")


def variables_problem(variables: Mapping[str, Any]) -> str | None:
    """What is wrong with the names of template variables, whatever the template."""
    for name in variables:
        if name in RESERVED_VARIABLES:
            return f"{name} can't be set as a template variable: it has a meaning of its own"
    return None


def _objects(name: str, value: Any) -> list[dict[str, Any]] | None:
    """A list of objects, or the JSON text of one, as data sets for training hold tools; None where it is empty."""
    given = value
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise RowError(f"{name} must be a list of objects, got {short(given)}") from None
    if not value and (value is None or isinstance(value, list)):
        return None
    if not isinstance(value, list) or not all(isinstance(item, Mapping) and item for item in value):
        raise RowError(f"{name} must be a list of objects, got {short(given)}")
    objects: list[dict[str, Any]] = without_nulls(value)
    return objects


def _variables(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RowError(f"chat_template_kwargs must be an object, got {short(value)}")
    variables: dict[str, Any] = without_nulls(value)
    problem = variables_problem(variables)
    if problem is not None:
        raise RowError(f"chat_template_kwargs: {problem}")
    return variables

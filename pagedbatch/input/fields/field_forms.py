"""Turns values under other tools' names into our own fields, one function per form.

Each function takes what the key is called in messages and its value, and gives our fields. A value of a wrong type is a
`RowError` that names the key as the user wrote it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from pagedbatch.errors import RowError
from pagedbatch.params import READERS
from pagedbatch.wording import short

#: Fields of ours, by name.
Fields = Mapping[str, Any]

#: Of vLLM's `structured_outputs` and `guided_decoding`: what holds a constraint, and the field of ours.
_CONSTRAINTS = {"json": "json_schema", "regex": "regex", "choice": "allowed_outputs", "grammar": "grammar"}
#: The rest of them that is so here in any case, or changes nothing.
_FIXED = {"backend", "disable_fallback", "disable_additional_properties"}
_ANY_OBJECT = {"type": "object"}
#: Types of a `response_format` that hold a constraint, and the field of ours.
_FORMAT_TYPES = {"json_schema": "json_schema", "json": "json_schema", "regex": "regex", "grammar": "grammar"}


def renamed(option: str) -> Callable[[str, Any], Fields]:
    """The same value as `option`, of the type that this one has."""
    reader = READERS.get(option)

    def read(said: str, value: Any) -> Fields:
        if reader is not None:
            reader(said, value)
        return {option: value}

    return read


def chat_kwarg(name: str, kind: type) -> Callable[[str, Any], Fields]:
    """A value of type `kind`, bool or str, that chat templates know as `name`."""

    def read(said: str, value: Any) -> Fields:
        if not isinstance(value, kind):
            raise RowError(f"{said} must be {'true or false' if kind is bool else 'text'}, got {short(value)}")
        return {"chat_template_kwargs": {name: value}}

    return read


def boolean(said: str, value: Any) -> bool:
    """A switch.

    Raises:
        RowError: it is none.
    """
    if not isinstance(value, bool):
        raise RowError(f"{said} must be true or false, got {short(value)}")
    return value


def structure(said: str, value: Any, kind: type[list[Any]] | type[Mapping[str, Any]]) -> Any:
    """A list or an object: the value itself, or what its JSON text says, as a cell of a table has it.

    Raises:
        RowError: it is neither.
    """
    found = value
    if isinstance(value, str):
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            found = None
    if not isinstance(found, kind):
        raise RowError(f"{said} must be {'a list' if kind is list else 'an object'}, got {short(value)}")
    return found


def is_object_list(value: Any) -> bool:
    """Whether a value is a list of objects, and not empty."""
    return isinstance(value, list) and bool(value) and all(isinstance(each, Mapping) for each in value)


def object_list(said: str, value: Any) -> list[Any]:
    """A list of objects, which may be empty, or its JSON text.

    Raises:
        RowError: it is something else.
    """
    found: list[Any] = structure(said, value, list)
    if found and not is_object_list(found):
        raise RowError(f"{said} must be a list of objects, got {short(value)}")
    return found


def choices(said: str, value: Any) -> Fields:
    """A list of allowed outputs, or its JSON text."""
    return {"allowed_outputs": structure(said, value, list)}


def do_sample(said: str, value: Any) -> Fields:
    """Hugging Face's switch between greedy search and samples; what it comes to depends on temperatures elsewhere."""
    return {"do_sample": boolean(said, value)}


def top_logprobs(said: str, value: Any) -> Fields:
    """OpenAI's number of alternatives, which counts beside `logprobs` true alone."""
    READERS["logprobs"](said, value)
    return {"top_logprobs": value}


def suppressed(said: str, value: Any) -> Fields:
    """Token ids that never come, each by itself."""
    return {"bad_words": [[token_id] for token_id in READERS["stop_token_ids"](said, value)]}


def add_special_tokens(said: str, value: Any) -> Fields:
    """False leaves out what the tokenizer puts in front; true is what happens anyway."""
    return {} if boolean(said, value) else {"add_bos": False}


def json_object(said: str, value: Any) -> Fields:
    """True: any JSON object."""
    return {"json_schema": _ANY_OBJECT} if boolean(said, value) else {}


def response_format(said: str, value: Any) -> Fields:
    """OpenAI's `text`, `json_object` and `json_schema`; also a schema beside `json_object`, `json`, `regex`, `grammar`.

    Raises:
        RowError: it is none of these.
    """
    asked = structure(said, value, Mapping)
    kind = asked.get("type")
    if kind == "text" or not asked:
        return {}
    if kind == "json_object":
        schema = asked.get("schema")
        return {"json_schema": _ANY_OBJECT if schema is None else schema}
    option = _FORMAT_TYPES.get(kind) if isinstance(kind, str) else None
    given = (asked.get(key) for key in (kind, "value", "schema", "pattern")) if option is not None else ()
    found = next((each for each in given if each is not None), None)
    if kind == "json_schema" and isinstance(found, Mapping) and found.keys() & {"schema", "name"}:
        found = found.get("schema")
    if option is None or found is None:
        raise RowError(f"{said} = {short(value)} is not supported")
    return {option: found}


def grammar(said: str, value: Any) -> Fields:
    """The text of a grammar; or, as TGI takes it, an object with the type and the value of a constraint."""
    if isinstance(value, Mapping):
        return response_format(said, value)
    return {"grammar": value}


def structured_outputs(said: str, value: Any) -> Fields:
    """The one constraint in an object of vLLM's.

    Raises:
        RowError: it holds more than one, or what can't be had.
    """
    asked = structure(said, value, Mapping)
    found: dict[str, Any] = {}
    for key, part in asked.items():
        if part is None or part is False or key in _FIXED:
            continue
        if key in _CONSTRAINTS:
            found[_CONSTRAINTS[key]] = part
        elif key == "json_object":
            found["json_schema"] = json_object(f"{said}.{key}", part)["json_schema"]
        else:
            raise RowError(f"{said}.{key} = {short(part)} is not supported")
    if len(found) > 1:
        raise RowError(f"{said} holds {' and '.join(found)}: a row takes one of them")
    return found

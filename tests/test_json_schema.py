"""Schemas whose outputs would not be held to them are found, and no others: xgrammar itself is asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engines import paged_model, tokenizer

from pagedbatch.constraints.json_schema import unheld_part

#: Schema, the part that is not held to, a value against the schema that xgrammar 0.2.9 lets through.
UNHELD: list[tuple[dict[str, Any], str, Any]] = [
    ({"not": {"type": "string"}}, "'not'", "a"),
    ({"if": {"type": "string"}, "then": {"maxLength": 1}}, "'if'", "abc"),
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "'uniqueItems'", [1, 1]),
    (
        {"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}},
        "'dependentRequired'",
        {"a": 1},
    ),
    ({"allOf": [{"type": "string"}, {"maxLength": 2}]}, "'allOf' of several schemas", "abcd"),
    ({"anyOf": [{"type": "integer"}], "maximum": 3}, "'maximum' beside 'anyOf'", 5),
    ({"$defs": {"x": {"type": "integer"}}, "$ref": "#/$defs/x", "maximum": 3}, "'maximum' beside '$ref'", 5),
    ({"enum": [1, "a"], "type": "string"}, "'enum' with values that are not of the 'type' beside it", 1),
    ({"const": True, "type": "integer"}, "'const' with values that are not of the 'type' beside it", True),
    ({"type": "string", "minLength": 2, "enum": ["a"]}, "'minLength' beside 'enum'", "a"),
    ({"maxLength": 2}, "'maxLength' without a 'type'", "abc"),
    ({"minimum": 3}, "'minimum' without a 'type'", 2),
    ({"required": ["a"]}, "'required' without a 'type'", {}),
    (
        {"type": "string", "pattern": "^a+$", "maxLength": 2},
        "'pattern' together with 'minLength' or 'maxLength'",
        "aaa",
    ),
    ({"type": "object", "required": ["z"]}, "'required' 'z', which is not among the properties,", {}),
]
#: Schema, values of it, values against it.
HELD: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    ({"enum": ["a", None], "type": ["string", "null"], "title": "t", "default": "a"}, ["a", None], ["b"]),
    ({"const": 3, "type": "integer"}, [3], [4]),
    ({"type": "integer", "minimum": 3, "multipleOf": 1}, [3], [2]),
    ({"type": "string", "pattern": "^a+$"}, ["aa"], ["b"]),
    ({"type": "string", "minLength": 1, "maxLength": 2}, ["aa"], ["", "aaa"]),
    (
        {"type": "array", "items": {"type": "integer"}, "maxItems": 2, "uniqueItems": False},
        [[1, 2]],
        [[1, 2, 3], ["a"]],
    ),
    ({"properties": {"not": {"type": "integer"}}, "required": ["not"]}, [{"not": 1}], [{}, {"not": "a"}]),
    ({"type": "object", "properties": {"a": {}}}, [{}, {"a": [1]}], [{"b": 1}]),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, [{"x": 1}], [{"x": "s"}]),
    ({"$ref": "#/$defs/x", "$defs": {"x": {"type": "integer"}}}, [1], ["s"]),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}], "description": "d"}, [1, None], ["s"]),
    ({"allOf": [{"type": "integer"}]}, [1], ["s"]),
    ({"type": "object"}, [{"x": {"y": [1]}}], [1]),
]


@pytest.mark.parametrize(("schema", "part", "_value"), UNHELD, ids=lambda value: str(value)[:30])
@pytest.mark.parametrize(
    ("place", "wrap"),
    [
        ("#", lambda schema: schema),
        ("#/properties/p", lambda schema: {"type": "object", "properties": {"p": schema}}),
        ("#/items/anyOf/1", lambda schema: {"type": "array", "items": {"anyOf": [{"type": "null"}, schema]}}),
        ("#/$defs/x", lambda schema: {"$ref": "#/$defs/x", "$defs": {"x": schema}}),
    ],
)
def test_what_is_not_held_to_is_found_wherever_it_stands(
    schema: dict[str, Any], part: str, _value: Any, place: str, wrap: Any
) -> None:
    assert unheld_part(wrap(schema)) == f"{part} at {place}"


@pytest.mark.parametrize("schema", [True, False, {}, *(schema for schema, _, _ in HELD)], ids=lambda s: str(s)[:40])
def test_the_rest_is_left_alone(schema: Any) -> None:
    assert unheld_part(schema) is None


@pytest.fixture(scope="module")
def accepts(rand_model_path: Path) -> Any:
    """Whether a value may be written under a schema."""
    xgrammar = pytest.importorskip("xgrammar", reason="xgrammar is not installed")
    vocabulary = xgrammar.TokenizerInfo.from_huggingface(
        tokenizer(rand_model_path), vocab_size=paged_model(rand_model_path).config.vocab_size
    )
    compiler = xgrammar.GrammarCompiler(vocabulary)

    def accept(schema: dict[str, Any], value: Any) -> bool:
        matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(json.dumps(schema)))
        return bool(matcher.accept_string(json.dumps(value)) and matcher.is_completed())

    return accept


@pytest.mark.parametrize(("schema", "_part", "value"), UNHELD, ids=lambda value: str(value)[:30])
def test_xgrammar_lets_it_through(accepts: Any, schema: dict[str, Any], _part: str, value: Any) -> None:
    """Fails when a new xgrammar has learned it: then it need not be refused any longer."""
    assert accepts(schema, value)


@pytest.mark.parametrize(("schema", "good", "bad"), HELD, ids=lambda value: str(value)[:40])
def test_xgrammar_holds_to_the_rest(accepts: Any, schema: dict[str, Any], good: list[Any], bad: list[Any]) -> None:
    assert [value for value in good if not accepts(schema, value)] == []
    assert [value for value in bad if accepts(schema, value)] == []

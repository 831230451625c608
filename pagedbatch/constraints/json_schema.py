"""What a JSON schema asks for that its grammar would not hold outputs to.

xgrammar 0.2 leaves these out without a word. An output that only seems to follow its schema is worse than a refusal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_ANNOTATIONS = {
    "$anchor", "$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description", "examples",
    "readOnly", "title", "writeOnly",
}  # fmt: skip
_NEVER_HELD = ("dependencies", "dependentRequired", "dependentSchemas", "if", "not")
#: A schema with one of these is read as nothing but that.
_WHOLE = ("$ref", "enum", "const", "anyOf", "oneOf", "allOf")
#: Without `type`, these say what the type is; others would be lost.
_IMPLY_TYPE = {"properties", "additionalProperties", "items", "prefixItems"}
_VALIDATE = {
    "contains", "exclusiveMaximum", "exclusiveMinimum", "maxItems", "maxLength", "maxProperties", "maximum", "minItems",
    "minLength", "minProperties", "minimum", "multipleOf", "pattern", "patternProperties", "propertyNames", "required",
}  # fmt: skip

_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "contains", "propertyNames", "unevaluatedItems", "unevaluatedProperties")

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "null": (type(None),),
    "object": (dict,), "array": (list,),
}  # fmt: skip


def unheld_part(schema: Any, place: str = "#") -> str | None:
    """The first thing in a schema that outputs would not be held to, with its place; None: there is none."""
    if not isinstance(schema, Mapping):
        return None
    found = next(_unheld(schema), None)
    if found is not None:
        return f"{found} at {place}"
    inner = (unheld_part(part, f"{place}/{name}") for name, part in _parts(schema))
    return next((problem for problem in inner if problem is not None), None)


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in _SCHEMA_MAPS:
        if isinstance(schema.get(name), Mapping):
            yield from ((f"{name}/{key}", part) for key, part in schema[name].items())
    for name in _SCHEMA_LISTS:
        if isinstance(schema.get(name), list):
            yield from ((f"{name}/{i}", part) for i, part in enumerate(schema[name]))
    for name in _SCHEMAS:
        yield name, schema.get(name)


def _unheld(schema: Mapping[str, Any]) -> Iterator[str]:
    yield from (repr(name) for name in _NEVER_HELD if name in schema)
    if schema.get("uniqueItems"):
        yield "'uniqueItems'"
    whole = next((name for name in _WHOLE if name in schema), None)
    if whole is not None:
        lost = sorted(schema.keys() - _ANNOTATIONS - {whole})
        if whole in ("enum", "const") and "type" in schema:
            lost.remove("type")
            if not _have_type(schema[whole] if whole == "enum" else [schema[whole]], schema["type"]):
                yield f"{whole!r} with values that are not of the 'type' beside it"
        if lost:
            yield f"{lost[0]!r} beside {whole!r}"
        if whole == "allOf" and len(schema["allOf"]) != 1:
            yield "'allOf' of several schemas"
        return
    if "type" not in schema and not schema.keys() & _IMPLY_TYPE:
        yield from (f"{name!r} without a 'type'" for name in sorted(schema.keys() & _VALIDATE))
    for name in ("pattern", "format"):
        if name in schema and schema.keys() & {"minLength", "maxLength"}:
            yield f"{name!r} together with 'minLength' or 'maxLength'"
    required, properties = schema.get("required"), schema.get("properties", {})
    if isinstance(required, list) and isinstance(properties, Mapping):
        yield from (f"'required' {name!r}, which is not among the properties," for name in required
                    if name not in properties)  # fmt: skip


def _have_type(values: Any, wanted: Any) -> bool:
    names = wanted if isinstance(wanted, list) else [wanted]
    types = tuple(each for name in names for each in _TYPES.get(name, ()))
    if not isinstance(values, list):
        return False
    return all(isinstance(value, types) and (not isinstance(value, bool) or bool in types) for value in values)

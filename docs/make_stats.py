"""Writes docs/stats.md, the keys of OUT.stats.json, from `pagedbatch/stats/schema.py`: `python docs/make_stats.py`."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pagedbatch.stats.record import Record, keys_of
from pagedbatch.stats.schema import Memory, PoolMemory, Stats

PAGE = Path(__file__).resolve().parent / "stats.md"

HEAD = """# The keys of OUT.stats.json

`pagedbatch run` writes the stats of a run beside its output, `pagedbatch merge` those of all shards together, and
`pagedbatch simulate --output` those of a simulation. `pagedbatch report` shows all of it. Later versions may add keys.

*Optional* keys are left out where they do not apply, or in files of older versions. Other keys that may be null say so.

<!-- made by docs/make_stats.py from pagedbatch/stats/schema.py -->
"""


def sections(kind: type[Record], path: str = "") -> Iterator[tuple[str, type[Record]]]:
    """The record at `path` and those in it, each once: shards hold stats like these, workers a pool like `memory`."""
    yield path, kind
    for field, hint in keys_of(kind):
        name = f"{path}.{field.name}" if path else field.name
        for inner in _records(hint):
            if inner not in (Stats, PoolMemory) and not (inner.__name__ == "Time" and path):
                yield from sections(inner, name + _suffix(hint))


def table(kind: type[Record]) -> str:
    lines = ["| key | unit or type | meaning |", "| --- | --- | --- |"]
    for field, hint in keys_of(kind):
        optional = " *Optional.*" if field.metadata["optional"] else ""
        lines.append(f"| `{field.name}` | {_type(hint)} | {field.metadata['help']}{optional} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    parts = [HEAD]
    seen: set[type[Record]] = set()
    for path, kind in sections(Stats):
        if kind not in seen:
            seen.add(kind)
            doc = cleandoc((PoolMemory if kind is Memory else kind).__doc__ or "").replace("\n", " ").replace("  ", " ")
            parts.append((f"## `{path}`\n\n{doc}\n\n" if path else "") + table(kind))
    return "\n".join(parts)


def _records(hint: Any) -> Iterator[type[Record]]:
    """The records in a hint."""
    if isinstance(hint, type) and issubclass(hint, Record):
        yield hint
    for argument in get_args(hint):
        yield from _records(argument)


def _suffix(hint: Any) -> str:
    """What follows the name of a key whose value contains records: `[]` for each of a list, `.NAME` of an object."""
    kinds = {get_origin(each) for each in (hint, *get_args(hint))}
    return "[]" if list in kinds else ".NAME" if dict in kinds else ""


def _type(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return str(arguments[1].unit) or "number"
    if origin in (Union, UnionType):
        return _type(arguments[0])
    if origin in (list, tuple):
        return "list"
    if origin is dict or (isinstance(hint, type) and issubclass(hint, Record)):
        return "object"
    return {str: "text", bool: "true or false"}.get(hint, "any")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

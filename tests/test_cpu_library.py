"""The declarations in library.py against C++: sizes, which are checked at load, and the fields in the sources."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pagedbatch_kernels.cpu import library
from pagedbatch_kernels.cpu.build import BuildError, can_load
from pagedbatch_kernels.cpu.gemm import PackedGemm

FOLDER = Path(library.__file__).parent
STRUCTS = pytest.mark.parametrize("struct", library.STRUCTS, ids=lambda struct: struct.__name__)
C_TYPES = {
    "int64_t": ctypes.c_int64,
    "int32_t": ctypes.c_int32,
    "float": ctypes.c_float,
    "LayerCache": library.LayerCache,
}


def without(fields: list[Any]) -> list[Any]:
    return fields[:-2]  # the last alone may be no more than padding


def added(fields: list[Any]) -> list[Any]:
    return [*fields, ("one", ctypes.c_int64)]


def changed(fields: list[Any]) -> list[Any]:
    """An int64 of 12 bytes, as one of 4 could be made up for by padding."""
    at = next(i for i, (_, ctype) in enumerate(fields) if ctype is ctypes.c_int64)
    return [*fields[:at], (fields[at][0], ctypes.c_int32 * 3), *fields[at + 1 :]]


@pytest.mark.skipif(not can_load(), reason="there is no C++ compiler here")
@pytest.mark.parametrize("change", [without, added, changed])
@STRUCTS
def test_a_struct_with_a_wrong_field_is_not_loaded(
    monkeypatch: pytest.MonkeyPatch, struct: type[ctypes.Structure], change: Callable[[list[Any]], list[Any]]
) -> None:
    wrong = type(struct.__name__, (ctypes.Structure,), {"_fields_": change(list(struct._fields_))})
    monkeypatch.setattr(library, "STRUCTS", [wrong if each is struct else each for each in library.STRUCTS])
    sizes = rf"{struct.__name__} has {ctypes.sizeof(struct)} bytes in C\+\+, but {ctypes.sizeof(wrong)} in"
    with pytest.raises(BuildError, match=sizes):
        PackedGemm()


def declared(name: str) -> list[tuple[str, Any]]:
    """The fields of a C++ struct, read off its source up to its first function."""
    text = "\n".join(path.read_text() for path in sorted(FOLDER.iterdir()) if path.suffix in (".cpp", ".h"))
    (body,) = re.findall(rf"struct {name} {{\n(.*?)(?:\n\n|}};)", text, re.DOTALL)
    fields = []
    for line in re.sub("//.*", "", body).splitlines():
        if line.strip():
            found = re.fullmatch(r" +(?:const )?(\w+)(\*?) ([\w, ]+); *", line)
            assert found, f"{name}: {line}"
            ctype = ctypes.c_void_p if found[2] else C_TYPES[found[1]]
            fields += [(field, ctype) for field in found[3].split(", ")]
    return fields


@STRUCTS
def test_fields_are_those_of_the_source(struct: type[ctypes.Structure]) -> None:
    assert list(struct._fields_) == declared(struct.__name__)

"""The rules of the sources that no linter knows: how long a file is, what a wheel holds, what a test may import."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

from host_modules import HOST

REPOSITORY = Path(__file__).resolve().parent.parent
MAX_LINES = 400
#: Folders of sources; what else may lie in a checkout (a virtual environment, build outputs) is not ours.
SOURCES = ("pagedbatch", "kernels", "tests", "benchmarks")


def _sources(*suffixes: str) -> Iterator[Path]:
    for folder in SOURCES:
        yield from (path for path in sorted((REPOSITORY / folder).rglob("*")) if path.suffix in suffixes)


def test_no_source_file_is_too_long() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in _sources(".py", ".cpp", ".h")}
    assert len(lengths) > 100
    assert {str(path.relative_to(REPOSITORY)): n for path, n in lengths.items() if n > MAX_LINES} == {}


def test_no_module_imports_a_test_module() -> None:
    """What tests share is in a module of its own: a test module can be run, renamed or removed alone."""
    found = []
    for path in _sources(".py"):
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [name.name for name in node.names] if isinstance(node, ast.Import) else []
            # A program that a test runs in a child process is a string.
            code = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            modules += [line.split()[1] for line in code.replace(";", "\n").splitlines() if _is_import(line)]
            found += [f"{path.name}: {name}" for name in modules if name.split(".")[-1].startswith("test_")]
    assert found == []


def _is_import(line: str) -> bool:
    words = line.split()
    return len(words) > 1 and words[0] in ("from", "import")


def test_the_wheel_holds_every_package() -> None:
    setuptools = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    folders = {
        ".".join(module.parent.relative_to(root).parts)
        for root, package in ((REPOSITORY, "pagedbatch"), (REPOSITORY / "kernels", "pagedbatch_kernels"))
        for module in (root / package).rglob("*.py")
    }
    assert sorted(setuptools["packages"]) == sorted(folders)


def test_the_modules_of_the_host_half_exist() -> None:
    assert {name for name in HOST if not (REPOSITORY / "tests" / f"{name}.py").exists()} == set()

"""The import arrows of ARCHITECTURE.md, read from the sources: nothing is imported here."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import resolve_name
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent

#: Which layers a layer may import. `plain` is the data that all share; the host half is engine, the device half model.
ARROWS = {
    "plain": {"plain"},
    "engine": {"plain", "engine"},
    "constraints": {"plain", "engine", "constraints"},
    "stats": {"plain", "stats"},
    "report": {"plain", "stats", "report"},
    "kernels": {"kernels"},
    "model": {"plain", "kernels", "model"},
    "input": {"plain", "constraints", "input"},
    "output": {"plain", "engine", "stats", "output"},
    "run": {"plain", "engine", "constraints", "stats", "model", "input", "output", "run"},
    "tools": {"plain", "engine", "constraints", "stats", "model", "input", "output", "run", "report", "tools"},
    "bench children": {"plain", "stats", "model", "input", "run", "tools", "bench children"},
    "cli": {"plain", "stats", "model", "input", "output", "run", "report", "tools", "cli"},
}
#: These layers never import a device library; they are tested, and start, without one.
HOST_ONLY = {"plain", "engine", "stats", "report", "output"}
DEVICE_LIBRARIES = {"torch", "transformers", "triton", "accelerate", "gguf", "xgrammar"}
#: These layers import the device half and slow libraries inside functions only: `--help` and wrong usage don't wait.
LAZY = {"input", "output", "run", "tools", "cli"}
SLOW_LIBRARIES = DEVICE_LIBRARIES | {"datasets", "pyarrow", "numpy", "matplotlib"}
#: All that imports ray. They are imported late themselves, by a run that asked for workers, and so need not be lazy.
RAY_MODULES = tuple(f"pagedbatch.run.workers.ray_{name}" for name in ("cluster", "dataset", "metadata_leak"))
#: A layer of their own: processes that the benchmark starts and must not import, for it has to stay small.
BENCH_CHILDREN = tuple(f"pagedbatch.tools.bench.{name}" for name in ("prepare", "dummy_model", "generate"))
PACKAGES = {
    "pagedbatch": REPOSITORY / "pagedbatch",
    "pagedbatch_kernels": REPOSITORY / "kernels" / "pagedbatch_kernels",
}


@dataclass(frozen=True)
class Import:
    """One imported module. `at_start`: it is imported when the importing module is."""

    importer: str
    imported: str
    line: int
    at_start: bool

    def __str__(self) -> str:
        return f"{self.importer}, line {self.line}, imports {self.imported}"


def layer(module: str) -> str | None:
    """The layer of one of our modules; None for anybody else's."""
    package, _, rest = module.partition(".")
    if package == "pagedbatch_kernels":
        return "kernels"
    if package != "pagedbatch":
        return None
    if f"{module}.".startswith(tuple(f"{child}." for child in BENCH_CHILDREN)):
        return "bench children"
    first = rest.partition(".")[0]
    return first if first in ARROWS else "plain"


def imports_of(source: str, module: str, is_package: bool = False) -> Iterator[Import]:
    """Every import in `source`, which is the text of `module`."""
    parent = module if is_package else module.rpartition(".")[0]

    def walk(node: ast.AST, at_start: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for name in node.names:
                yield Import(module, name.name, node.lineno, at_start)
        elif isinstance(node, ast.ImportFrom):
            origin = resolve_name("." * node.level + (node.module or ""), parent)
            for name in node.names:  # a name may itself be a module
                yield Import(module, f"{origin}.{name.name}", node.lineno, at_start)
        else:
            type_checking = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            deferred = type_checking or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            for child in ast.iter_child_nodes(node):
                yield from walk(child, at_start and not deferred)

    yield from walk(ast.parse(source), True)


def broken_rule(found: Import) -> str | None:
    """What is wrong with an import, if anything."""
    importing, imported = layer(found.importer), layer(found.imported)
    assert importing is not None
    library = found.imported.partition(".")[0]
    if imported is not None and imported not in ARROWS[importing]:
        return f"{importing} must not know {imported}"
    if importing in HOST_ONLY and library in DEVICE_LIBRARIES:
        return f"{importing} must not know device libraries"
    if found.importer in RAY_MODULES:
        return None
    if library == "ray":
        return f"only {' and '.join(RAY_MODULES)} import ray"
    if found.at_start and found.imported.startswith(RAY_MODULES):
        return f"{importing} imports what imports ray inside functions only"
    if importing in LAZY and found.at_start and (library in SLOW_LIBRARIES or imported == "model"):
        return f"{importing} imports the device half and slow libraries inside functions only"
    return None


def all_imports() -> list[Import]:
    found: list[Import] = []
    for package, folder in PACKAGES.items():
        for file in sorted(folder.rglob("*.py")):
            parts = file.relative_to(folder).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            module = ".".join([package, *(parts[:-1] if is_package else parts)])
            found += imports_of(file.read_text(encoding="utf-8"), module, is_package)
    return found


def test_imports_follow_the_arrows() -> None:
    found = all_imports()
    assert {layer(each.importer) for each in found} == set(ARROWS), "a layer has no import at all: wrong folders?"
    assert [f"{each}: {broken_rule(each)}" for each in found if broken_rule(each)] == []


def cycles(imports: Iterable[tuple[str, str]]) -> list[list[str]]:
    """The groups of modules that import each other in a circle (Tarjan 1972)."""
    graph: dict[str, set[str]] = {}
    for importer, imported in imports:
        graph.setdefault(importer, set()).add(imported)
        graph.setdefault(imported, set())
    numbers: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        numbers[module] = lowest[module] = len(numbers)
        path.append(module)
        for imported in sorted(graph[module]):
            if imported not in numbers:
                visit(imported)
            if imported in path:
                lowest[module] = min(lowest[module], lowest[imported])
        if lowest[module] == numbers[module]:
            start = path.index(module)
            if len(path) - start > 1:
                found.append(sorted(path[start:]))
            del path[start:]

    for module in sorted(graph):
        if module not in numbers:
            visit(module)
    return found


def test_no_imports_go_in_a_circle() -> None:
    """Imports inside functions and for type checking count too."""
    modules = {each.importer for each in all_imports()}

    def module_of(imported: str) -> str:
        return imported if imported in modules else imported.rpartition(".")[0]

    edges = ((each.importer, module_of(each.imported)) for each in all_imports() if layer(each.imported))
    assert cycles((importer, imported) for importer, imported in edges if importer != imported) == []


def test_a_circle_is_found() -> None:
    assert cycles([("a", "b"), ("b", "c"), ("c", "a"), ("c", "d"), ("d", "e")]) == [["a", "b", "c"]]


def test_importing_the_kernels_package_needs_no_device_library() -> None:
    at_start = [each for each in all_imports() if each.importer == "pagedbatch_kernels" and each.at_start]
    assert [
        str(each) for each in at_start if layer(each.imported) or each.imported.partition(".")[0] in DEVICE_LIBRARIES
    ] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("pagedbatch.engine.x", "import torch"),
        ("pagedbatch.engine.x", "def f():\n    import torch.nn"),
        ("pagedbatch.engine.x", "from pagedbatch.model import runner"),
        ("pagedbatch.engine.x", "from ..model.runner import Runner"),
        (
            "pagedbatch.model.x",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pagedbatch.engine import scheduler",
        ),
        ("pagedbatch.outputs", "from pagedbatch.engine.engine import Engine"),
        ("pagedbatch.stats.x", "from transformers import AutoConfig"),
        ("pagedbatch.run.x", "from pagedbatch.model.runner import Runner"),
        ("pagedbatch.run.x", "class A:\n    import torch"),
        ("pagedbatch.cli.x", "import datasets"),
        ("pagedbatch.run.x", "from pagedbatch import cli"),
        ("pagedbatch.run.x", "from pagedbatch.tools.bench import workload"),
        ("pagedbatch.tools.bench.x", "def f():\n    from pagedbatch.tools.bench.generate import measure"),
        ("pagedbatch.tools.bench.x", "import torch"),
        ("pagedbatch_kernels.x", "from pagedbatch import outputs"),
        ("pagedbatch.run.workers.pool", "def f():\n    import ray"),
        ("pagedbatch.run.workers.pool", "from pagedbatch.run.workers.ray_dataset import Worker"),
        ("pagedbatch.run.workers.ray_dataset", "import ray\nfrom pagedbatch.cli.app import main"),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str) -> None:
    assert any(broken_rule(each) for each in imports_of(source, module))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("pagedbatch.run.x", "def f():\n    from pagedbatch.model.runner import Runner"),
        ("pagedbatch.cli.x", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("pagedbatch.model.x", "import torch\nfrom pagedbatch_kernels import reference"),
        ("pagedbatch.engine.x", "from pagedbatch.outputs import BlockCopy\nimport heapq"),
        ("pagedbatch.run.workers.ray_dataset", "import ray\nimport pyarrow"),
        ("pagedbatch.run.x", "def f():\n    from pagedbatch.run.workers.ray_dataset import Worker"),
    ],
)
def test_a_right_import_is_left_alone(module: str, source: str) -> None:
    assert not any(broken_rule(each) for each in imports_of(source, module))

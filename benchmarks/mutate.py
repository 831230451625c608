"""Breaks a module in small ways and lists the ways that no test notices. No test runs it.

    python benchmarks/mutate.py pagedbatch/engine/beam_search.py tests/test_beam_search.py tests/test_diverse_beams.py

Each mutation changes one place of the module's syntax tree: a comparison, an operator, a condition, a constant, `min`
for `max`, or a statement that is dropped. The tests run against a temporary copy, the working tree is never touched. A
mutation survives when all tests pass; one that runs into the time limit counts as noticed. Survivors are printed as
`file:line: mutation`: each is a test that is missing, or a change that makes no difference.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: What the tests import or read.
COPIED = ["pagedbatch", "kernels", "tests", "benchmarks", "recipes", "docs", "pyproject.toml", "README.md"]

COMPARISONS: dict[type[ast.cmpop], list[type[ast.cmpop]]] = {
    ast.Lt: [ast.LtE, ast.GtE],
    ast.LtE: [ast.Lt, ast.Gt],
    ast.Gt: [ast.GtE, ast.LtE],
    ast.GtE: [ast.Gt, ast.Lt],
    ast.Eq: [ast.NotEq],
    ast.NotEq: [ast.Eq],
    ast.Is: [ast.IsNot],
    ast.IsNot: [ast.Is],
    ast.In: [ast.NotIn],
    ast.NotIn: [ast.In],
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
SWAPPED_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}


def expression_mutants(node: ast.AST) -> Iterator[ast.AST]:
    """Every small change of one expression, without its children."""
    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            for other in COMPARISONS[type(op)]:
                yield ast.Compare(node.left, [*node.ops[:i], other(), *node.ops[i + 1 :]], node.comparators)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.And() if isinstance(node.op, ast.Or) else ast.Or(), node.values)
        for i in range(len(node.values)):
            rest = node.values[:i] + node.values[i + 1 :]
            yield rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield node.operand
    elif isinstance(node, ast.IfExp):
        yield node.body
        yield node.orelse
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield ast.Constant(not node.value)
        elif isinstance(node.value, (int, float)):
            yield ast.Constant(node.value + 1)
            if node.value:
                yield ast.Constant(node.value - 1)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in SWAPPED_CALLS:
        yield ast.Call(ast.Name(SWAPPED_CALLS[node.func.id], ast.Load()), node.args, node.keywords)


def statement_mutants(node: ast.stmt) -> Iterator[ast.stmt]:
    """The statement dropped, or its condition always or never true."""
    if isinstance(node, (ast.Assign, ast.AugAssign, ast.Delete, ast.Break, ast.Continue, ast.Raise)) or (
        isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant)
    ):
        yield ast.Pass()
    elif isinstance(node, (ast.If, ast.While)):
        changed = copy.copy(node)
        changed.test = ast.UnaryOp(ast.Not(), node.test)
        yield changed
    elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        yield ast.Return(ast.Constant(None))


def is_ignored(node: ast.AST) -> bool:
    """Annotations, docstrings, messages and imports change nothing that a test should look at."""
    if isinstance(node, (ast.Import, ast.ImportFrom, ast.JoinedStr, ast.Assert)):
        return True
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    return False


def mutants(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """(line, what was changed, the module's new source) for each mutation."""

    def visit(node: ast.AST) -> Iterator[tuple[int, str, str]]:
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list"):
                continue
            children = list(value) if isinstance(value, list) else [value]
            for i, child in enumerate(children):
                if not isinstance(child, ast.AST) or is_ignored(child):
                    continue
                changes: Iterator[ast.AST] = (
                    statement_mutants(child) if isinstance(child, ast.stmt) else expression_mutants(child)
                )
                for changed in changes:
                    replaced = [*children[:i], changed, *children[i + 1 :]] if isinstance(value, list) else changed
                    setattr(node, name, replaced)
                    source = ast.unparse(ast.fix_missing_locations(tree))
                    setattr(node, name, value)
                    line = getattr(child, "lineno", 0)
                    yield line, f"{_first_line(child)}  ->  {_first_line(changed)}", source
                yield from visit(child)

    yield from visit(tree)


def _first_line(node: ast.AST) -> str:
    return ast.unparse(ast.fix_missing_locations(copy.deepcopy(node))).splitlines()[0]


def tests_pass(folder: Path, tests: list[str], seconds: float) -> bool:
    """Whether all tests pass within the time limit, in a copy of the tree."""
    paths = os.pathsep.join([str(folder / "kernels"), str(folder)])
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(seconds) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # the tests' own children, too
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("module", help="file to break, relative to the repository")
    parser.add_argument("tests", nargs="+", help="test files that should notice")
    parser.add_argument("--lines", help="only mutations in these lines, as in 100-140")
    parser.add_argument("--every", type=int, default=1, help="try every N-th mutation")
    arguments = parser.parse_args()
    first, _, last = (arguments.lines or "0-1000000").partition("-")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `timeout` leaves no folder and no tests behind
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in COPIED:
            if (ROOT / part).is_dir():
                shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
            elif (ROOT / part).exists():
                shutil.copy(ROOT / part, folder / part)
        module = folder / arguments.module
        tree = ast.parse(module.read_text(encoding="utf-8"))
        began = time.monotonic()
        if not tests_pass(folder, arguments.tests, seconds=600):
            raise SystemExit("the tests fail before anything is changed")
        limit = 10 + 5 * (time.monotonic() - began)
        selected = [each for each in mutants(tree) if int(first) <= each[0] <= int(last)][:: arguments.every]
        survivors = 0
        for line, what, source in selected:
            module.write_text(source, encoding="utf-8")
            if tests_pass(folder, arguments.tests, limit):
                survivors += 1
                print(f"{arguments.module}:{line}: {what}", flush=True)
        print(f"{arguments.module}: {len(selected)} mutations, {survivors} survived", flush=True)


if __name__ == "__main__":
    main()

"""The command as a user meets it: in a process of its own, by its exit code, its stdout and its stderr."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from log_lines import log_lines
from rich.console import Console

from pagedbatch.cli.progress import Progress, make_progress
from pagedbatch.run.job import run_job
from pagedbatch.settings import OPTIONS, merge

REPOSITORY = Path(__file__).resolve().parent.parent
SLOW_MODULES = ("torch", "transformers", "triton", "datasets", "pyarrow", "numpy")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TERM": "dumb"}
MAIN = "from pagedbatch.cli.app import main; main()"


def _start(folder: Path, *arguments: object, code: str = MAIN, **options: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, cwd=folder, env=ENVIRONMENT, stdout=-1, stderr=-1, **options)


def _pagedbatch(folder: Path, *arguments: object, code: str = MAIN, stdin: bytes = b"") -> tuple[int, bytes, str]:
    with _start(folder, *arguments, code=code, stdin=-1) as process:
        out, err = process.communicate(stdin)
    return process.returncode, out, err.decode()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [{"id": "a", "prompt": "c"}, {"id": "b", "prompt": "bd"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["--version"], []])
def test_help_imports_nothing_slow(tmp_path: Path, arguments: list[str]) -> None:
    code = f"""
import sys
from pagedbatch.cli.app import main
try:
    main()
finally:
    loaded = [name for name in {SLOW_MODULES!r} if name in sys.modules]
    print("loaded:", loaded)
"""
    exit_code, out, err = _pagedbatch(tmp_path, *arguments, code=code)
    assert exit_code == (0 if arguments else 2)
    assert b"loaded: []" in out
    assert len(out.splitlines()) > 1
    assert err == ""


def test_version() -> None:
    from pagedbatch import __version__

    assert _pagedbatch(Path(), "--version") == (0, f"pagedbatch {__version__}\n".encode(), "")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["runn"], "No such command 'runn'"),
        (["run", "in.jsonl", "--temprature", "1"], "No such option: --temprature"),
        (["run", "in.jsonl", "--n", "two"], "Invalid value for '--n'"),
        (["run", "in.jsonl", "-o", "x.jsonl"], "--model is missing"),
        (["run", "-m", "M", "-o", "x.jsonl"], "INPUT is missing"),
        (["run", "in.jsonl", "-m", "M"], "--output is missing"),
        (["run", "none.jsonl", "-m", "M", "-o", "x.jsonl"], "none.jsonl: no such file or folder"),
        (["run", "in.jsonl", "-m", "./none", "-o", "x.jsonl"], "model './none': no such folder"),
        (["run", "in.jsonl", "-m", "M", "-o", "in.jsonl"], "would overwrite the input"),
        (["run", "in.jsonl", "-m", "M", "-o", "no/x.jsonl"], "does not exist: make it first"),
        (["run", "in.jsonl", "-m", "M", "-o", "x.jsonl", "--split", "train"], "--split is for datasets"),
        (["run", "in.jsonl", "-m", "M", "-o", "x.jsonl", "--prompt-column", "q"], "its columns are id, prompt"),
        (["run", "in.jsonl", "-m", "M", "-o", "x.jsonl", "--kv-memory", "lots"], "'lots' is not a size"),
        (["run", "in.jsonl", "-m", "M", "-o", "x.jsonl", "--n", "2", "--temperature", "0"], "n 2 with temperature 0"),
        (["run", "in.jsonl", "-m", "M", "-o", "x.jsonl", "--logit-bias", "{5: 1}"], "--logit-bias: malformed JSON"),
        (["run", "in.jsonl", "--recipe", "none.toml"], "--recipe none.toml: no such file"),
        (["run", "--recipe", "bad.toml"], "unknown key 'temprature': did you mean 'temperature'?"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(folder: Path, arguments: list[str], reason: str) -> None:
    (folder / "bad.toml").write_text("temprature = 1\n")
    exit_code, out, err = _pagedbatch(folder, *arguments)
    assert (exit_code, out) == (2, b"")
    assert err.startswith("error: ")
    assert reason in err
    assert err.count("\n") == 1
    assert sorted(path.name for path in folder.iterdir()) == ["bad.toml", "in.jsonl"]


def test_a_recipe_and_the_flags_over_it(folder: Path, table_model_path: Path) -> None:
    recipe = folder / "job.toml"
    recipe.write_text(f"""
input = "in.jsonl"
model = "{table_model_path}"
output = "out/recipe.jsonl"
dtype = "float32"
device = "cpu"
num-blocks = 64
stop = ["h"]
max_tokens = 2
""")
    (folder / "out").mkdir()
    exit_code, out, err = _pagedbatch(folder, "run", "--recipe", "job.toml", "--max-tokens", 8, "--stop", "gh")
    assert (exit_code, out) == (0, b"")
    records = [json.loads(line) for line in (folder / "out" / "recipe.jsonl").read_text().splitlines()]
    assert [record["outputs"][0]["text"] for record in records] == ["f", "ef"]
    settings = json.loads((folder / "out" / "recipe.stats.json").read_text())["settings"]
    assert settings["num_blocks"]["source"] == "recipe"
    assert settings["max_tokens"] == {"value": 8, "source": "command line"}
    assert "2 of 2 rows" in err
    assert str(folder / "out" / "recipe.jsonl") in err


def test_stdin_to_stdout_and_a_bad_row(folder: Path, table_model_path: Path) -> None:
    rows = (folder / "in.jsonl").read_bytes() + b"nonsense\n"
    flags = ["--dtype", "float32", "--device", "cpu", "--num-blocks", 64, "-o", "-"]
    exit_code, out, err = _pagedbatch(folder, "run", "-", "-m", table_model_path, *flags, stdin=rows)
    assert exit_code == 3
    records = [json.loads(line) for line in out.splitlines()]
    assert [record["id"] for record in records] == ["a", "b", None]
    assert [record["status"] for record in records] == ["ok", "ok", "error"]
    assert "1 error" in err
    assert sorted(path.name for path in folder.iterdir()) == ["in.jsonl"]


def test_killed_and_resumed_nothing_is_lost(folder: Path, rand_model_path: Path) -> None:
    rows = [json.dumps({"id": i, "prompt": f"prompt {i}", "n": 1 + i % 3}) for i in range(200)]
    (folder / "long.jsonl").write_text("\n".join(rows))
    settings = {"max_tokens": 24, "max_num_seqs": 6, "num_blocks": 128, "dtype": "float32", "device": "cpu"}
    given = {"input": str(folder / "long.jsonl"), "model": str(rand_model_path), **settings}
    flags = [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", value)]

    output, journal = folder / "out.jsonl", folder / "out.jsonl.journal"
    with _start(folder, "run", given["input"], "-m", given["model"], "-o", output, *flags) as process:
        while process.poll() is None and (not journal.exists() or journal.read_bytes().count(b"\n") < 20):
            os.sched_yield()
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not output.exists()
    lines = journal.read_bytes().splitlines(keepends=True)[1:]
    kept = [json.loads(line) for line in lines if line.endswith(b"\n")]
    assert 19 <= len({record["index"] for record in kept}) == len(kept) < 200

    def open_view(total: int, resumed: int) -> Progress:
        return make_progress(total, resumed, Console(quiet=True))

    with log_lines() as notices:
        assert run_job(merge({**given, "output": str(output)}, {}), open_view).exit_code == 0
    assert notices == [f"resuming: {len(kept)} of 200 rows are finished already"]
    assert not journal.exists()
    whole = folder / "whole.jsonl"
    assert run_job(merge({**given, "output": str(whole)}, {}), open_view).exit_code == 0
    assert _token_ids(output) == _token_ids(whole)


def _token_ids(path: Path) -> dict[int, list[list[int]]]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return {record["id"]: [output["token_ids"] for output in record["outputs"]] for record in records}


@pytest.mark.parametrize(
    ("signals", "deferred", "exit_code", "out"),
    [(1, True, 0, b"asked True\n"), (2, True, 130, b""), (1, False, 0, b"interrupted\n")],
)
def test_a_second_signal_ends_at_once(signals: int, deferred: bool, exit_code: int, out: bytes) -> None:
    code = f"""
import os, signal
from pagedbatch.run.interrupts import Interrupts
with Interrupts() as interrupts:
    interrupts.deferred = {deferred}
    try:
        for _ in range({signals}):
            os.kill(os.getpid(), signal.SIGTERM)
        print("asked", interrupts.requested)
    except KeyboardInterrupt:
        print("interrupted")
"""
    assert _pagedbatch(Path(), code=code) == (exit_code, out, "")


def test_recipes_hold_only_settings() -> None:
    recipes = sorted((REPOSITORY / "recipes").glob("*.toml"))
    assert recipes
    for recipe in recipes:
        assert {key.replace("-", "_") for key in tomllib.loads(recipe.read_text())} <= OPTIONS.keys(), recipe.name

"""Rows that have no end, beside healthy ones: an error each, and the bytes of the others as without them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from log_lines import log_lines
from tiny_job import SilentView

from pagedbatch.errors import UsageError
from pagedbatch.run.job import run_job
from pagedbatch.run.open import open_input, prepare_job
from pagedbatch.settings import merge

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="rows are prepared in the same process there")

#: Endless for one message, three tokens for another.
TEMPLATE = (
    "{% if messages[0]['content'] == 'endless' %}"
    "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}"
    "{% elif messages[0]['content'] == 'large' %}{{ 'x' * 4000000000 }}"
    "{% else %}hi {{ messages[0]['content'] }}{% endif %}"
)
SCHEMA = {"enum": [f"value number {i}" for i in range(100_000)]}
HOSTILE: list[dict[str, Any]] = [
    {"id": "schema", "prompt": "a", "json_schema": SCHEMA},
    {"id": "schema again", "prompt": "b", "json_schema": SCHEMA},
    {"id": "long", "prompt": "x" * 10_000_000},
    {"id": "template", "messages": [{"role": "user", "content": "endless"}]},
    {"id": "template of gigabytes", "messages": [{"role": "user", "content": "large"}]},
    {"id": "tokens", "prompt_token_ids": [5] * 1_000_000},
    {"id": "outputs", "prompt": "c", "allowed_outputs": [f"output {i}" for i in range(1_000_000)]},
]
HEALTHY: list[dict[str, Any]] = [
    {"id": f"healthy {i}", "prompt": f"Row {i}", "temperature": 1, "n": 2} for i in range(6)
] + [
    {"id": "chat", "messages": [{"role": "user", "content": "you"}]},
    {"id": "held", "prompt": "x", "json_schema": {"enum": ["yes", "no"]}},
]


@pytest.fixture(scope="module")
def model(rand_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoTokenizer

    path = tmp_path_factory.mktemp("hostile") / "model"
    shutil.copytree(rand_model_path, path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def records(folder: Path, model: Path, rows: list[dict[str, Any]], name: str) -> tuple[int, dict[str, Any]]:
    source = write(folder / f"{name}.in.jsonl", rows)
    output = folder / f"{name}.jsonl"
    given = {"input": str(source), "model": str(model), "output": str(output), "max_tokens": 6, "num_blocks": 400,
             "dtype": "float32", "row_prepare_timeout": 2}  # fmt: skip
    result = run_job(merge(given, {}), lambda *_: SilentView())
    found = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [record["id"] for record in found] == [row["id"] for row in rows]
    return result.exit_code, {record["id"]: record for record in found}


def test_a_run_ends_with_hostile_rows_as_errors_and_the_others_as_without_them(tmp_path: Path, model: Path) -> None:
    pytest.importorskip("xgrammar")
    mixed = [row for pair in zip(HEALTHY, [*HOSTILE, {}], strict=True) for row in pair if row]
    exit_code, found = records(tmp_path, model, mixed, "mixed")
    assert exit_code == 3
    reasons = {name: found[name]["error"].partition(": ")[2] for name in (row["id"] for row in HOSTILE)}
    took = "took more than 2 s of CPU time (--row-prepare-timeout)"
    assert reasons["schema"] == f"compiling json_schema {took}"
    assert reasons["schema again"] == f"not tried: for an earlier row, compiling json_schema {took}"
    assert reasons["long"].startswith("the prompt is too long: the first ")
    assert reasons["template"] == f"rendering the chat template {took}"
    assert reasons["template of gigabytes"] == "rendering the chat template took more than 1 GiB of memory"
    assert reasons["tokens"].startswith("the prompt has 1000000 tokens, and the model's limit of 512")
    assert reasons["outputs"] == f"building the trie of allowed_outputs {took}"
    alone_code, alone = records(tmp_path, model, HEALTHY, "alone")
    assert alone_code == 0
    for name, record in alone.items():
        assert found[name]["outputs"] == record["outputs"], name
        assert found[name]["usage"] == record["usage"], name


def test_strict_lists_all_bad_rows_in_order(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "in.jsonl"
    lines = ['{"prompt": "a"}', '{"prompt": "cut', '{"x": 1}', '{"prompt": "a", "n": 0}',
             '{"messages": [{"role": 5, "content": "a"}]}', '{"messages": [{"role": "user", "content": "endless"}]}',
             '{"prompt": "b"}']  # fmt: skip
    path.write_text("\n".join(lines), encoding="utf-8")
    given = {"input": str(path), "model": str(model), "output": "-", "strict": True, "row_prepare_timeout": 2}
    settings = merge(given, {})
    with (
        log_lines() as told,
        pytest.raises(UsageError, match=r"^--strict: 5 of 7 rows can't be answered; nothing was started$"),
    ):
        prepare_job(settings, open_input(settings))
    assert [line.partition(":")[0] for line in told] == [f"line {i}" for i in range(2, 7)]


@pytest.mark.parametrize(
    "command", [["run", "--output", "out.jsonl"], ["run", "--output", "out.jsonl", "--strict"], ["plan"]]
)
def test_an_interrupt_ends_preparation_at_once_and_leaves_no_process(
    tmp_path: Path, model: Path, command: list[str]
) -> None:
    rows = [{"prompt": 5}, {"messages": [{"role": "user", "content": "endless"}]}]
    source = write(tmp_path / "in.jsonl", rows)
    process = subprocess.Popen(
        [sys.executable, "-c", "from pagedbatch.cli.app import main; main()", command[0], str(source), "--model",
         str(model), "--row-prepare-timeout", "3600", *command[1:]],
        cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stderr is not None
    wait_for_busy_grandchild(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    message = process.stderr.read()  # to its end: nobody holds the pipe any more
    assert process.wait() == 130
    assert "interrupted" in message
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def wait_for_busy_grandchild(pid: int) -> None:
    """Until a child of a child has computed for a while, which only the endless row makes it do."""
    import psutil

    parent = psutil.Process(pid)
    while parent.is_running():
        for child in parent.children():
            for grandchild in child.children():
                if grandchild.cpu_times().user > 0.5:
                    return

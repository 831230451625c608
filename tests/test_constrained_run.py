"""Constraints as a user meets them: flags, recipes, rows and OpenAI rows, from the command to the records."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pagedbatch.errors import UsageError
from pagedbatch.run.job import run_job
from pagedbatch.settings import merge

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TERM": "dumb"}
COMMAND = [sys.executable, "-c", "from pagedbatch.cli.app import main; main()", "run", "in.jsonl"]


def pagedbatch(folder: Path, model: Path, *arguments: object) -> tuple[int, list[dict[str, Any]], str]:
    """Exit code, records and stderr of a run over the folder's `in.jsonl`."""
    fixed = ("--model", model, "--output", "out.jsonl", "--device", "cpu", "--dtype", "float32")
    command = [*COMMAND, *map(str, fixed), *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True)
    output = folder / "out.jsonl"
    records = [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []
    return done.returncode, records, done.stderr.decode()


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> None:
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def texts(record: dict[str, Any]) -> list[str]:
    return [output["text"] for output in record["outputs"]]


def test_a_catalog_for_the_run_and_other_outputs_for_a_row(tmp_path: Path, table_model_path: Path) -> None:
    (tmp_path / "items.txt").write_bytes(b"cfgh\r\nb\n\nbd\n[5, 7, 8, 9, 10, 11]\nb\n")
    write_rows(
        tmp_path,
        [
            {"id": 1, "prompt": "a"},
            {"id": 2, "prompt": "a", "allowed_outputs": ["c", "zz"], "n": 2},
            {"id": 3, "prompt": "a", "allowed_outputs": ["é"]},
            {"id": 4, "prompt": "a", "num_beams": 1, "n": 3, "temperature": 1.0},
        ],
    )
    beams = ("--constrain-to", "items.txt", "--num-beams", 6, "--n", 6, "--max-tokens", 8)
    exit_code, records, err = pagedbatch(tmp_path, table_model_path, *beams)
    assert exit_code == 3, err
    assert texts(records[0]) == ["cfgh", "bdefgh", "b", "bd"]
    assert records[0]["note"] == "only 4 of 6 outputs: no more are possible"
    assert texts(records[1]) == ["c", "zz"]
    assert "note" not in records[1]
    assert records[2]["error"] == "line 3: allowed_outputs[0]: this model has no tokens for 'é'"
    assert set(texts(records[3])) <= {"cfgh", "bdefgh", "b", "bd"}
    stats = json.loads((tmp_path / "out.stats.json").read_text())
    assert stats["settings"]["constrain_to"] == {"value": "items.txt", "source": "command line"}


class StoppedError(Exception):
    """The end that a test gave a run."""


class StopAfterOneRow:
    """A display that ends the run once a row is finished."""

    def __enter__(self) -> StopAfterOneRow:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def update(self, snapshot: object, rows_done: int, rows_error: int) -> None:
        if rows_done:
            raise StoppedError


def start(folder: Path, model: Path, **settings: Any) -> None:
    """Begins a run in this process."""
    given = {"input": str(folder / "in.jsonl"), "model": str(model), "output": str(folder / "out.jsonl"), **settings}
    run_job(merge(given, {}), lambda total, resumed: StopAfterOneRow())


def test_another_catalog_does_not_resume(tmp_path: Path, table_model_path: Path) -> None:
    """The content counts, not the name: a journal with the old one's rows is refused."""
    write_rows(tmp_path, [{"id": i, "prompt": "a"} for i in range(3)])
    items = tmp_path / "items.txt"
    items.write_text("b\n")
    settings = {"constrain_to": str(items), "max_num_seqs": 1}
    with pytest.raises(StoppedError):
        start(tmp_path, table_model_path, **settings)
    items.rename(tmp_path / "same.txt")
    with pytest.raises(StoppedError):
        start(tmp_path, table_model_path, **settings | {"constrain_to": str(tmp_path / "same.txt")})
    items.write_text("c\n")
    with pytest.raises(UsageError, match="constraint: was 'catalog "):
        start(tmp_path, table_model_path, **settings)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"constrain_to": "bad.txt"}, r"--constrain-to .*/bad.txt, line 2: 99 is no token id of this model"),
        ({"constrain_to": "good.txt", "stop": ["x"]}, r"--constrain-to .*/good.txt can't be combined with stop"),
        (
            {"constrain_to": "good.txt", "ignore_eos": True},
            r"--constrain-to .*/good.txt can't be combined with ignore_eos",
        ),
        ({"constrain_to": "good.txt", "max_tokens": 1}, r"--constrain-to .*/good.txt: no item fits max_tokens 1"),
        ({"constrain_to": "good.txt", "regex": "x"}, r"--constrain-to and --regex can't be combined: give one"),
        ({"json_schema": '{"not": {}}'}, r"--json-schema: outputs can't be held to 'not' at #"),
    ],
)
def test_what_is_refused_before_the_model_loads(
    tmp_path: Path, table_model_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], reason: str
) -> None:
    (tmp_path / "bad.txt").write_text("b\n[99]\n")
    (tmp_path / "good.txt").write_text("b\n")
    write_rows(tmp_path, [{"prompt": "a"}])
    monkeypatch.setattr("pagedbatch.model.loader.load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    if "constrain_to" in given:
        given = given | {"constrain_to": str(tmp_path / given["constrain_to"])}
    with pytest.raises(UsageError) as refused:
        start(tmp_path, table_model_path, **given)
    assert re.match(reason, str(refused.value))
    assert "\n" not in str(refused.value)


def test_grammars_from_flags_recipes_and_rows(tmp_path: Path, rand_model_path: Path) -> None:
    pytest.importorskip("xgrammar", reason="xgrammar is not installed")
    (tmp_path / "g.ebnf").write_text('root ::= "yes" | "no" [ab]{1,3}\n')
    (tmp_path / "r.toml").write_text('max_tokens = 90\n[json_schema]\ntype = "boolean"\n')
    schema = {"type": "object", "properties": {"k": {"enum": ["x", "é"]}}, "required": ["k"]}
    body = {"prompt": "q", "n": 2, "temperature": 1.0}
    format_ = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    write_rows(
        tmp_path,
        [
            {"id": 1, "prompt": "a"},
            {"id": 2, "prompt": "b", "json_schema": schema, "n": 2, "temperature": 1.0},
            {"id": 3, "prompt": "a", "json_schema": {"type": "integer", "minimum": 5, "maximum": 3}},
            {"id": 4, "prompt": "a", "regex": "[ab]{3}c", "num_beams": 4, "n": 4},
            {"custom_id": "5", "url": "/v1/completions", "body": {**body, "response_format": format_}},
        ],
    )
    exit_code, records, err = pagedbatch(tmp_path, rand_model_path, "--grammar", "g.ebnf", "--max-tokens", 90)
    assert exit_code == 3, err
    assert re.fullmatch("yes|no[ab]{1,3}", texts(records[0])[0])
    assert {json.loads(text)["k"] for text in texts(records[1])} <= {"x", "é"}
    assert records[2]["error"] == "line 3: json_schema: Invalid range: minimum greater than maximum"
    assert len({text for text in texts(records[3]) if re.fullmatch("[ab]{3}c", text)}) >= 2
    choices = records[4]["response"]["body"]["choices"]
    assert {json.loads(choice["text"])["k"] for choice in choices} <= {"x", "é"}

    exit_code, records, err = pagedbatch(tmp_path, rand_model_path, "--recipe", "r.toml", "--limit", 1)
    assert exit_code == 0, err
    assert texts(records[0])[0] in ("true", "false")

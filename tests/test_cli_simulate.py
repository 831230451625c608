"""`pagedbatch simulate` as a command: what it writes, what it says, what it refuses."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pagedbatch.cli.app import app
from pagedbatch.errors import UsageError

SHAPE = ("--num-layers", 2, "--num-kv-heads", 3, "--head-dim", 8)


def write_csv(path: Path, *rows: tuple[Any, ...]) -> str:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return str(path)


def cli(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)], standalone_mode=False)


def test_the_command_writes_what_report_reads(tmp_path: Path) -> None:
    trace = write_csv(tmp_path / "t.csv", ("input_length", "output_length"), (20, 5), (30, 8))
    stats = tmp_path / "t.stats.json"
    result = cli(trace, "--n", 3, "--num-blocks", 100, "--max-tokens", 10, "--output", stats)
    assert result.exit_code == 0, result.output
    assert "sharing" in result.stdout
    assert "steps     8 without a model, 39 tokens out" in result.stdout, "no speed is claimed"
    written = json.loads(stats.read_text())
    assert written["simulated"] is True
    assert written["throughput"]["output_tokens"] == 3 * 13
    assert written["settings"]["n"] == {"value": 3, "source": "command line"}
    assert written["settings"]["max_num_seqs"]["source"] == "default"
    assert written["settings"]["max_model_len"] == {"value": None, "source": "default", "used": 2048}
    assert CliRunner().invoke(app, ["report", str(stats)]).exit_code == 0


def test_requests_that_can_not_run_end_it_with_3() -> None:
    result = cli("--log-normal", "100,10,0", "--limit", 3, "--num-blocks", 2)
    assert result.return_value == 3
    assert "3 requests could not run; the first: request 0:" in result.output


def test_lengths_of_0_are_told(tmp_path: Path) -> None:
    result = cli(write_csv(tmp_path / "t.csv", ("input_length", "output_length"), (0, 5), (3, 0), (4, 4)))
    assert result.exit_code == 0
    assert "2 requests had a length of 0: it was taken as 1" in result.stderr
    assert "cut" not in result.stderr


def test_a_models_shape_says_how_large_a_block_is(tmp_path: Path) -> None:
    """2 x 2 layers x 3 heads x 8 numbers x 4 bytes x 16 tokens a block."""
    stats = tmp_path / "t.stats.json"
    arguments = ("--log-normal", "9,5,0", *SHAPE, "--dtype", "float32", "--kv-memory", "60KiB", "--limit", 2)
    assert cli(*arguments, "--output", stats).exit_code == 0
    memory = json.loads(stats.read_text())["memory"]
    assert (memory["block_bytes"], memory["num_blocks"]) == (6144, 10)


def test_rows_with_a_prefix_in_common_find_it(tmp_path: Path) -> None:
    """4 rows, one after the other: the second of each group finds the 2 blocks that its first one filled."""
    rows = ((40, 2, "a"), (40, 2, "b"), (40, 2, "a"), (40, 2, "b"))
    trace, stats = write_csv(tmp_path / "t.csv", ("input_length", "output_length", "few"), *rows), tmp_path / "s.json"
    result = cli(trace, "--prefix-column", "few", "--prefix-length", 35, "--max-num-seqs", 1, "--output", stats)
    assert result.exit_code == 0, result.output
    assert json.loads(stats.read_text())["memory"]["prefix_cache"] == {"queried_tokens": 160, "hit_tokens": 64}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give a trace, or --log-normal"),
        (("--log-normal", "1,2"), "--log-normal: '1,2' is not IN,OUT,SIGMA"),
        (("--log-normal", "1,2,1", "--sample-lengths", "own"), "--sample-lengths"),
        (("--log-normal", "1,2,1", "--preemption", "never"), "--preemption"),
        (("--log-normal", "1,2,1", "--kv-memory", "1GiB"), "--kv-memory needs --model or its shape"),
        (("--log-normal", "1,2,1", "--num-layers", 2), "--num-layers, --num-kv-heads and --head-dim: give all three"),
        ((*SHAPE, "--log-normal", "1,2,1", "--model", "nowhere"), "give one or the other"),
        (("--log-normal", "1,2,1", "--prefix-length", "5"), "leave them and --prefix-length out"),
        (("--log-normal", "1,2,1", "--dtype", "int4"), "--dtype must be one of float32, bfloat16, float16, got 'int4'"),
        (("nowhere.csv",), "nowhere.csv"),
        (("--log-normal", "1,2,1", "--num-beams", 4, "--n", 2), "leave --n and --sample-lengths out"),
    ],
)
def test_wrong_usage_is_told(arguments: tuple[str, ...], message: str) -> None:
    result = cli(*arguments)
    assert isinstance(result.exception, UsageError)
    assert message in str(result.exception)

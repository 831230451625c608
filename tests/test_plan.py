"""`pagedbatch plan` against the runs that it plans: the same figures where lengths are known, bounds where not."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tiny_job import SilentView
from typer.testing import CliRunner

from pagedbatch.cli.app import app
from pagedbatch.errors import UsageError
from pagedbatch.run.job import Ui, run_job
from pagedbatch.settings import merge
from pagedbatch.tools.plan.plan import Plan, make_plan
from pagedbatch.tools.plan.tables import print_plan
from pagedbatch.tools.plan.verdict import NOTHING

EXAMPLES = "Q: 12 and 30?\nA: 42, for two and nothing are two, and one and three are four.\n\n" * 3

#: Settings by job: greedy outputs, samples, and prompts that begin alike; in pools that are short for some rows.
JOBS: dict[str, dict[str, Any]] = {
    "greedy": {"ignore_eos": True, "max_tokens": 40, "num_blocks": 50, "temperature": 0.0},
    "samples": {
        "n": 8,
        "top_k": 20,
        "min_tokens": 30,
        "max_tokens": 30,
        "num_blocks": 120,
        "generation_config": "none",
    },
    "few-shot": {
        "ignore_eos": True,
        "max_tokens": 24,
        "num_blocks": 90,
        "prompt_template": EXAMPLES + "Q: {prompt}\nA:",
    },
    "beams": {"num_beams": 4, "ignore_eos": True, "max_tokens": 20, "num_blocks": 400},
}


def ask(folder: Path, rows: list[Any], model: Path, **settings: Any) -> dict[str, Any]:
    path = folder / "in.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    small = {"device": "cpu", "dtype": "float32", "attention": "torch", "max_num_seqs": 16, "num_blocks": 200}
    return {"input": str(path), "model": str(model), "output": str(folder / "out.jsonl")} | small | settings


def prompts(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{i} " + "tell me more " * (i * 7 % 10)} for i in range(count)]


def planned(settings: dict[str, Any], **options: Any) -> Plan:
    given = {"expect_tokens": None, "simulated_rows": None, "notice": print, "show_progress": lambda _: None} | options
    return make_plan(merge(settings, {}), **given)


def memory_of_run(settings: dict[str, Any]) -> dict[str, Any]:
    ui = Ui(notice=lambda _: None, open_view=lambda *_: SilentView())
    result = run_job(merge(settings, {}), ui)
    assert result.exit_code == 0
    assert result.stats.memory is not None
    return result.stats.memory.to_json()


@pytest.mark.parametrize("job", ["greedy", "samples", "few-shot"])
def test_where_lengths_are_known_the_run_does_what_the_plan_says(
    tmp_path: Path, rand_model_path: Path, job: str
) -> None:
    settings = ask(tmp_path, prompts(30), rand_model_path, **JOBS[job])
    forecasts = planned(settings).forecasts
    assert forecasts is not None
    assert [each.outputs for each in forecasts.by_length] == ["known"]
    memory = memory_of_run(settings)
    for name in ("peak_live_blocks", "peak_running_sequences", "mean_running_sequences", "sharing_saving", "kv_used"):
        assert getattr(forecasts.likely, name) == pytest.approx(memory[name], rel=0.05, abs=0.005), name
    assert forecasts.likely.preemptions == sum(memory["preemptions"].values())


def test_of_beams_the_saving_is_a_model_and_the_rest_exact(tmp_path: Path, rand_model_path: Path) -> None:
    settings = ask(tmp_path, prompts(12), rand_model_path, **JOBS["beams"])
    forecasts = planned(settings).forecasts
    assert forecasts is not None
    memory = memory_of_run(settings)
    assert forecasts.likely.mean_running_sequences == pytest.approx(memory["mean_running_sequences"], rel=0.05)
    assert forecasts.likely.sharing_saving == pytest.approx(memory["sharing_saving"], abs=0.15)


@pytest.mark.parametrize("n", [1, 4])
def test_where_outputs_end_by_themselves_the_run_lies_between_the_bounds(
    tmp_path: Path, rand_model_path: Path, n: int
) -> None:
    settings = ask(tmp_path, prompts(40), rand_model_path, n=n, temperature=1.0, top_k=20, max_tokens=60)
    forecasts = planned(settings).forecasts
    assert forecasts is not None
    assert [each.outputs for each in forecasts.by_length] == ["one token", "one block", "expected", "the limit"]
    memory = memory_of_run(settings)
    for name in ("peak_live_blocks", "mean_running_sequences", "sharing_saving"):
        figures = [getattr(each, name) for each in forecasts.by_length]
        assert min(figures) <= memory[name] <= max(figures), name


def test_an_expected_length_moves_the_likely_figures_only(tmp_path: Path, rand_model_path: Path) -> None:
    settings = ask(tmp_path, prompts(40), rand_model_path, max_tokens=60)
    short, long = (planned(settings, expect_tokens=tokens).forecasts for tokens in (5, 40))
    assert short is not None
    assert long is not None
    assert short.likely.mean_output_tokens < 8
    assert 25 < long.likely.mean_output_tokens < 40, "a mean of 40, cut at 60"
    assert short.by_length[0] == long.by_length[0]
    assert short.by_length[-1] == long.by_length[-1]


@pytest.mark.parametrize("job", ["greedy", "samples"])
def test_in_the_advised_memory_no_row_waits(tmp_path: Path, rand_model_path: Path, job: str) -> None:
    settings = ask(tmp_path, prompts(30), rand_model_path, **JOBS[job])
    forecasts = planned(settings).forecasts
    assert forecasts is not None
    del settings["num_blocks"]
    advised = {"block_size": forecasts.advice.block_size, "kv_memory": forecasts.advice.kv_memory}
    memory, roomy = (memory_of_run(settings | size | {"restart": True}) for size in (advised, {"kv_memory": "100MB"}))
    assert memory["preemptions"] == {"swap": 0, "recompute": 0}
    assert memory["mean_running_sequences"] == roomy["mean_running_sequences"]
    assert memory["num_blocks"] < 1.6 * memory["peak_live_blocks"], "and it is not just a large one"


def test_no_weights_are_needed(tmp_path: Path, rand_model_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(rand_model_path, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    found = planned(ask(tmp_path, prompts(3), bare))
    stored = (rand_model_path / "model.safetensors").stat().st_size
    assert found.sizes.weight_bytes == pytest.approx(stored, rel=0.05)
    assert found.sizes.dtype == "float32"
    assert found.sizes.token_bytes == 2 * 2 * 2 * 16 * 4, "K and V, layers, heads, head size, bytes"
    assert found.sizes.block_bytes == 16 * found.sizes.token_bytes


def test_the_unasked_pool_is_the_runs_own(
    tmp_path: Path, rand_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagedbatch.model.kv_cache.free_memory", lambda _: 2_000_000)
    settings = ask(tmp_path, prompts(3), rand_model_path, num_blocks=None)
    sizes = planned(settings).sizes
    assert sizes.num_blocks == (2_000_000 - sizes.weight_bytes) // 2 // sizes.block_bytes
    too_large = planned(settings | {"num_blocks": 1000}).sizes
    assert not too_large.fits


def test_rows_that_can_not_run_are_named(tmp_path: Path, rand_model_path: Path) -> None:
    rows = [
        *prompts(2),
        '{"prompt": ',
        {"question": "none"},
        {"prompt": "x" * 600},
        {"prompt": "y" * 100, "n": 8, "temperature": 1},
    ]
    settings = ask(tmp_path, rows, rand_model_path, num_blocks=20, max_tokens=100, strict=True)
    found = planned(settings).rows
    assert (found.num_rows, found.num_ok, found.num_refused) == (6, 2, 4)
    assert found.refused[0].startswith("line 3: ")
    assert "no prompt" in found.refused[1]
    assert "leaves no room" in found.refused[2]
    assert found.refused[3].startswith("line 6: needs ")
    assert "but the pool has 20" in found.refused[3]
    many = planned(ask(tmp_path, [{"q": 1, "prompt": None}] * 9, rand_model_path)).rows
    assert (many.num_refused, len(many.refused)) == (9, 5)


def test_prompt_lengths_are_of_all_rows_and_only_the_first_are_simulated(tmp_path: Path, rand_model_path: Path) -> None:
    rows = [{"prompt_token_ids": [5] * (i + 1)} for i in range(100)]
    found = planned(ask(tmp_path, rows, rand_model_path), simulated_rows=7)
    table = found.rows.prompts
    assert table is not None
    assert (table.count, table.min, table.mean, table.max) == (100, 1, 50.5, 100)
    assert (table.p50, table.p90, table.p99) == (50, 90, 99)
    assert [request.request_id for request in found.rows.first] == list(range(7))


def test_unasked_rows_are_simulated_up_to_an_amount_of_work(
    tmp_path: Path, rand_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagedbatch.tools.plan.rows._MAX_OUTPUT_TOKENS", 1000)
    ok, long = {"prompt": "a", "max_tokens": 5}, {"prompt": "a", "max_tokens": 200}
    settings = ask(tmp_path, [*[ok] * 8, "{", *[long] * 6, *[ok] * 5], rand_model_path, max_num_seqs=2)
    assert len(planned(settings).rows.first) == 8 + 5, "5 x 200 are the tokens; short ones behind them don't count"
    assert len(planned(settings | {"max_num_seqs": 9}).rows.first) == 18, "and twice 9 must run"
    assert len(planned(settings, simulated_rows=16).rows.first) == 16


@pytest.mark.parametrize(
    "own",
    [
        {"prompt_logprobs": 1},
        {"prompt_logprobs": 1, "max_tokens": 0},
        {"max_tokens": 0},
        {"n": 2, "best_of": 6, "temperature": 1.0},
        {"n": 2, "sample_index": 40, "temperature": 1.0},
        {"n": 40, "temperature": 1.0},
        {"num_beams": 6, "num_beam_groups": 3, "diversity_penalty": 0.5},
        {"repetition_penalty": 1.5, "bad_words": ["a"], "logprobs": 2, "stop_token_ids": [4]},
        {"regex": "[a-c]*"},
    ],
    ids=str,
)
def test_whatever_a_row_asks_for_is_planned(tmp_path: Path, rand_model_path: Path, own: dict[str, Any]) -> None:
    """Beside plain rows, whose figures must not go astray: every output that can be written is counted."""
    rows = [row | (own if i % 3 == 0 else {}) for i, row in enumerate(prompts(12))]
    forecasts = planned(ask(tmp_path, rows, rand_model_path, max_tokens=20)).forecasts
    assert forecasts is not None
    assert forecasts.by_length[-1].peak_live_blocks >= forecasts.by_length[0].peak_live_blocks > 0
    asked = [row.get("n", 1) * row.get("max_tokens", 20) for row in rows]
    outputs = sum(row.get("n", 1) for row in rows)
    assert forecasts.by_length[-1].mean_output_tokens == pytest.approx(sum(asked) / outputs, abs=0.01)


@pytest.mark.parametrize(
    ("settings", "pays"),
    [
        ({"ignore_eos": True, "max_num_seqs": 1}, False),
        ({"ignore_eos": True}, False),
        ({"n": 8, "temperature": 1.0, "ignore_eos": True}, True),
        ({}, True),
    ],
    ids=["one at a time", "equal known lengths", "samples", "lengths not known"],
)
def test_the_verdict_is_honest(tmp_path: Path, rand_model_path: Path, settings: dict[str, Any], pays: bool) -> None:
    rows = [{"prompt_token_ids": [i + 4] * 40} for i in range(20)]
    found = planned(ask(tmp_path, rows, rand_model_path, max_tokens=30, **settings))
    assert found.forecasts is not None
    verdict = found.forecasts.verdict
    assert verdict.pays is pays
    assert (verdict.headline == NOTHING) is not pays
    assert [scheme.name for scheme in verdict.schemes] == ["paged", "max", "pow2", "oracle"]
    assert any(character.isdigit() for reason in verdict.reasons for character in reason)


def test_the_run_of_a_shard_is_planned_for_its_rows(tmp_path: Path, rand_model_path: Path) -> None:
    found = planned(ask(tmp_path, prompts(30), rand_model_path, shard="1/3"))
    assert found.rows.num_rows == 10
    assert found.rows.first[0].request_id == 10


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_tables_keep_to_the_terminal(tmp_path: Path, rand_model_path: Path, width: int) -> None:
    console = Console(width=width, record=True, file=io.StringIO())
    print_plan(planned(ask(tmp_path, [*prompts(9), "{"], rand_model_path)), console)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert "paging" in text
    assert "that no row waits" in text


def test_what_stands_on_the_first_rows_says_so(tmp_path: Path, rand_model_path: Path) -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    print_plan(planned(ask(tmp_path, prompts(9), rand_model_path), simulated_rows=3), console)
    text = console.export_text()
    assert "from the first 3 rows" in text
    assert "that none of these rows waits" in text


def test_a_run_on_workers_is_planned_for_one_process_and_told_so(tmp_path: Path, rand_model_path: Path) -> None:
    notices: list[str] = []
    planned(ask(tmp_path, prompts(3), rand_model_path, workers=2), notice=notices.append)
    assert [notice.partition(":")[0] for notice in notices] == ["planned for one process"]


def cli(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)], standalone_mode=False)


def test_the_command_reads_a_recipe_whose_output_is_nowhere(tmp_path: Path, rand_model_path: Path) -> None:
    settings = ask(tmp_path, [*prompts(4), "{"], rand_model_path)
    recipe = tmp_path / "job.toml"
    recipe.write_text(f'input = "{settings["input"]}"\noutput = "nowhere/x.jsonl"\nmax_tokens = 5\nstop = ["x"]\n')
    figures = tmp_path / "plan.json"
    flags = ("--recipe", recipe, "--model", rand_model_path, "--num-blocks", 50, "--json", figures)
    result = cli(*flags, "--stop", r"\n", "--device", "cpu")
    assert result.return_value == 3, result.output
    written = json.loads(figures.read_text())
    assert written["rows"] | {"first_errors": []} == {
        "total": 5, "ok": 4, "error": 1, "first_errors": [], "truncated": 0, "simulated": 4
    }  # fmt: skip
    assert written["settings"]["max_tokens"] == {"value": 5, "source": "recipe"}
    assert written["settings"]["stop"] == {"value": ["\n"], "source": "command line"}
    assert written["likely"]["outputs"] == "expected"
    assert written["sizes"]["num_blocks"] == 50


def test_an_input_without_a_row_that_runs_is_told(tmp_path: Path, rand_model_path: Path) -> None:
    settings = ask(tmp_path, [{"prompt": "a", "n": 0}], rand_model_path)
    result = cli(settings["input"], "-m", rand_model_path)
    assert result.return_value == 3
    assert "no row can run" in result.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "--model is missing"),
        (("-m", "./none"), "no such folder"),
        (("-m", "./none", "--json", "nowhere/plan.json"), "--json: there is no folder nowhere"),
    ],
)
def test_wrong_usage_is_told(tmp_path: Path, flags: tuple[str, ...], message: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "a"}\n')
    result = cli(path, *flags)
    assert isinstance(result.exception, UsageError)
    assert message in str(result.exception)

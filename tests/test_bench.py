"""The benchmark: that it runs, and that its figures add up. No figure is judged."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from typer.testing import CliRunner

from pagedbatch.cli.app import app
from pagedbatch.errors import RunError, UsageError
from pagedbatch.tools.bench.compare import run_pagedbatch
from pagedbatch.tools.bench.dummy_model import dummy_prompts, make_dummy_model
from pagedbatch.tools.bench.generate import Generator, best_batch_size
from pagedbatch.tools.bench.prepare import prepare
from pagedbatch.tools.bench.processes import ask, run_python
from pagedbatch.tools.bench.workload import BenchJob, built_in_prompts, choose_jobs, read_prompts

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)], standalone_mode=False)


def test_the_figures_of_a_dummy_model_add_up(config_file: Path, tmp_path: Path) -> None:
    written = tmp_path / "bench.json"
    result = run(
        *("--model", config_file, "--dummy-weights", "--dummy-length", 20, "--num-prompts", 5, "--max-tokens", 6),
        *("--jobs", "sampling", "--n", 3, "--repeats", 2, "--batch-sizes", "1,2", "--generate-seconds", 20),
        *("--dtype", "float32", "--kv-memory", "4MiB", "--json", written),
    )
    assert result.exit_code == 0, result.output
    found = json.loads(written.read_text())
    assert (found["dtype"], found["prompts"], found["dummy_weights"]) == ("float32", 5, True)
    per_layer = 32 * (32 + 16 + 16 + 32) + 3 * 32 * 48 + 2 * 32
    assert found["weight_bytes"] == 4 * (2 * 96 * 32 + 2 * per_layer + 32)
    assert [(job["name"], job["n"], job["num_beams"]) for job in found["jobs"]] == [("sampling", 3, 1)]
    for job in found["jobs"]:
        ours, theirs = job["pagedbatch"], job["generate"]
        assert ours["output_tokens"] == 5 * job["n"] * 6
        assert ours["prompt_tokens"] == 5 * 20
        assert theirs["output_tokens"] == theirs["prompts"] * job["n"] * 6
        for side in (ours, theirs):
            assert side["tokens_per_second"] == pytest.approx(side["output_tokens"] / side["seconds"], rel=1e-2)
            assert side["peak_bytes"] > found["weight_bytes"]
        assert job["ratio"] == pytest.approx(ours["tokens_per_second"] / theirs["tokens_per_second"], abs=1e-3)
        assert len(job["tokens_per_second_of_all_runs"]) == 2
        assert ours["tokens_per_second"] == min(job["tokens_per_second_of_all_runs"])
        assert set(ours["time"]) == {"model", "attention", "sampling", "host", "io"}
        assert 0 < sum(ours["time"].values()) <= 1.05 * ours["seconds"] + ours["startup_seconds"]
        assert theirs["batch_size"] in (1, 2)
    shown = result.stdout
    assert "random weights" in shown
    assert all(word in shown for word in ("n=3 x 6", "start-up"))


def test_a_folder_with_a_tokenizer_keeps_it(rand_model_path: Path, tmp_path: Path) -> None:
    only_config = tmp_path / "config"
    shutil.copytree(rand_model_path, only_config, ignore=shutil.ignore_patterns("*.safetensors"))
    written = tmp_path / "bench.json"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "abc"}\n{"prompt_token_ids": [4, 5]}\n{"prompt": "abcd", "n": 3, "max_tokens": 1}\n')
    result = run(
        *(prompts, "--model", only_config, "--dummy-weights", "--num-prompts", 3, "--max-tokens", 3, "--repeats", 1),
        *("--jobs", "greedy", "--no-generate", "--kv-memory", "4MiB", "--json", written),
    )
    assert result.exit_code == 0, result.output
    (job,) = json.loads(written.read_text())["jobs"]
    assert job["generate"] is job["ratio"] is None
    assert job["pagedbatch"]["prompt_tokens"] == 4 + 2 + 5  # with <bos>; what else the row asks for is left out


class FakeGenerator(Generator):
    """Answers at once; the clock is moved by what each batch size costs."""

    def __init__(self, num_prompts: int, seconds: dict[int, float], monkeypatch: pytest.MonkeyPatch) -> None:
        self.prompts = [[1]] * num_prompts
        self.now, self._seconds = 0.0, seconds
        monkeypatch.setattr("pagedbatch.tools.bench.generate.time.perf_counter", lambda: self.now)

    def run(self, prompts: Any) -> int:
        self.now += self._seconds[len(prompts)]
        return 10 * len(prompts)


def test_the_best_batch_size_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeGenerator(100, {1: 1.0, 4: 2.0, 16: 4.0, 32: 20.0}, monkeypatch)
    assert best_batch_size(fake, [16, 1, 32, 4], 1000) == (16, {1: 10.0, 4: 20.0, 16: 40.0, 32: 16.0})
    slow = FakeGenerator(100, {1: 1.0, 4: 2.0}, monkeypatch)
    assert best_batch_size(slow, [1, 4, 16], 2.5) == (4, {1: 10.0, 4: 20.0})
    few = FakeGenerator(3, {1: 1.0, 3: 1.0}, monkeypatch)
    assert best_batch_size(few, [1, 4, 16], 1000)[0] == 3


def test_no_prompt_comes_twice(tmp_path: Path) -> None:
    assert len({prompt["prompt"] for prompt in built_in_prompts(1000)}) == len(built_in_prompts(1000)) == 32
    assert built_in_prompts(3) == built_in_prompts(1000)[:3]
    assert dummy_prompts(2, 3, 50) == dummy_prompts(2, 3, 50)
    path = tmp_path / "rows.jsonl"
    body = {"model": "x", "messages": [{"role": "user", "content": "b"}], "max_tokens": 1}
    rows = [
        {"prompt": "a", "stop": "x"},
        {"custom_id": "b", "method": "POST", "url": "/v1/chat/completions", "body": body},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_prompts(str(path), 3) == [{"prompt": "a"}, {"messages": body["messages"]}]


@pytest.mark.parametrize(("text", "message"), [("", "there is no row"), ('{"prompt": "a"}\nbroken\n', "line 2")])
def test_an_input_that_can_not_be_read(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_prompts(str(path), 3)


@pytest.mark.parametrize("name", ["greedy", "sampling", "beams"])
def test_generate_goes_on_after_end_tokens(table_model_path: Path, tmp_path: Path, name: str) -> None:
    """Nearly every token of this model is followed by the end."""
    prompts = tmp_path / "prompts.json"
    prompts.write_text("[[10, 11], [12]]")
    (job,) = choose_jobs([name], n=3, num_beams=2, max_tokens=9)
    model = {"model": str(table_model_path), "device": "cpu", "dtype": "float32"}
    generator = Generator({**model, "prompts": str(prompts), "kwargs": job.generate_kwargs})
    assert generator.run(generator.prompts) == 2 * job.n * 9


def test_a_failure_of_generate_leaves_our_figures(monkeypatch: pytest.MonkeyPatch, config_file: Path) -> None:
    def fail_at_generate(module: str, *rest: Any) -> Any:
        if module.endswith("generate"):
            raise RunError("generate failed: no memory")
        return ask(module, *rest)

    monkeypatch.setattr("pagedbatch.tools.bench.compare.ask", fail_at_generate)
    work = ("--jobs", "greedy", "--num-prompts", 2, "--max-tokens", 3, "--repeats", 1)
    result = run("--model", config_file, "--dummy-weights", "--dummy-length", 20, *work, "--kv-memory", "4MiB")
    assert result.return_value == 1
    assert "generate failed: no memory" in result.stdout
    assert "weights + pool (4.00 MiB) + 700 MB" in result.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_no_process(config_file: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", "from pagedbatch.cli.app import main; main()", "bench", "--dummy-weights"]
    with subprocess.Popen([*command, "-m", config_file], stderr=subprocess.PIPE, text=True) as process:
        children: list[psutil.Process] = []
        while process.poll() is None and not children:
            children = psutil.Process(process.pid).children()
        process.send_signal(number)
        _, told = process.communicate()
    assert process.returncode == 130
    assert told.splitlines()[-1].startswith("interrupted")
    assert not any(child.is_running() for child in children)


def test_an_interrupt_keeps_the_jobs_that_were_measured(
    monkeypatch: pytest.MonkeyPatch, config_file: Path, tmp_path: Path
) -> None:
    def interrupt_beams(job: BenchJob, *rest: Any) -> dict[str, Any]:
        if job.name == "beams":
            raise KeyboardInterrupt
        return run_pagedbatch(job, *rest)

    monkeypatch.setattr("pagedbatch.tools.bench.compare.run_pagedbatch", interrupt_beams)
    written = tmp_path / "bench.json"
    work = ("--jobs", "greedy,beams", "--num-prompts", 2, "--max-tokens", 3, "--repeats", 1, "--no-generate")
    result = run("--model", config_file, "--dummy-weights", "--dummy-length", 20, *work, "--json", written)
    assert result.return_value == 130
    assert "interrupted: 1 of 2 jobs were measured" in result.stderr
    assert [job["name"] for job in json.loads(written.read_text())["jobs"]] == ["greedy"]
    assert "greedy" in result.stdout


def test_jobs_say_the_same_to_both_sides() -> None:
    greedy, sampling, beams = choose_jobs(["greedy", "sampling", "beams"], n=8, num_beams=4, max_tokens=5)
    assert greedy.generation["temperature"] == 0.0
    assert not greedy.generate_kwargs["do_sample"]
    assert (sampling.generation["top_p"], sampling.generate_kwargs["top_p"]) == (0.95, 0.95)
    assert (beams.n, beams.generate_kwargs["num_beams"], beams.generation["num_beams"]) == (4, 4, 4)
    for job in (greedy, sampling, beams):
        assert job.generate_kwargs["num_return_sequences"] == job.generation["n"]
        assert job.generate_kwargs["min_new_tokens"] == job.generation["max_tokens"] == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--jobs", "greedy,fast"), "--jobs: 'fast' is none of greedy, sampling, beams"),
        (("--batch-sizes", "1,many"), "--batch-sizes: '1,many' is not a list of numbers"),
        (("--json", "nowhere/bench.json"), "there is no folder nowhere"),
    ],
)
def test_wrong_usage_is_told(arguments: tuple[str, ...], message: str) -> None:
    result = run("--model", "x", *arguments)
    assert isinstance(result.exception, UsageError)
    assert message in str(result.exception)


def test_a_model_that_can_not_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba", "vocab_size": 10}))
    with pytest.raises(UsageError, match="mamba"):
        make_dummy_model(str(tmp_path), tmp_path / "model", torch.float32)


def test_weights_that_do_not_fit_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setattr("pagedbatch.tools.bench.dummy_model.shutil.disk_usage", lambda _: SimpleNamespace(free=60_000))
    with pytest.raises(UsageError, match=r"the weights take 84.6 KiB, and free is 58.6 KiB of"):
        make_dummy_model(str(tmp_path), tmp_path / "model", torch.float32)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt_token_ids": [1] * 125}, "line 1: 125 prompt tokens and --max-tokens 4 are more than the model's 128"),
        ({"prompt_token_ids": [96]}, "line 1: prompt_token_ids: 96 is no token id"),
        ({"prompt": "a"}, "no tokenizer beside the config"),
    ],
)
def test_a_wrong_prompt_is_told_before_anything_is_measured(
    config_file: Path, tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    rows = tmp_path / "in.jsonl"
    rows.write_text(json.dumps(row) + "\n")
    question = {
        "model": str(config_file),
        "run_flags": {"device": "cpu", "dtype": "float32"},
        "rows": str(rows),
        "own_prompts": True,
        "max_tokens": 4,
        "dummy_weights": True,
        "folder": str(tmp_path),
    }
    with pytest.raises(UsageError) as error:
        prepare(question)
    assert message in str(error.value)


def test_the_last_line_of_a_side_that_fails_is_told() -> None:
    with pytest.raises(RunError, match=r"the thing failed \(exit code 3\): no such luck"):
        run_python(
            ["-c", "import sys; print('hello', flush=True); print('no such luck', file=sys.stderr); sys.exit(3)"],
            "the thing",
        )


def test_a_process_that_was_killed_says_so() -> None:
    with pytest.raises(RunError, match="killed, probably for want of memory"):
        run_python(["-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"], "the thing")


def test_a_process_is_weighed_alone() -> None:
    """From a small parent, as the command is and this process is not."""
    code = """
import sys
from pagedbatch.tools.bench import compare
from pagedbatch.tools.bench import table
from pagedbatch.tools.bench.processes import ask, run_python
assert "torch" not in sys.modules
print(*(run_python(["-c", f"text = b'x' * ({size} << 20)"], "a").peak_bytes >> 20 for size in (0, 200)))
"""
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    small, large = map(int, out.split())
    assert small < 100
    assert 200 < large < 300

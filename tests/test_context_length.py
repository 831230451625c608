"""How long a sequence may be: the config's length, rotary scalings, and --max-model-len."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import RecordingRunner, hf_model, paged_model
from log_lines import log_lines
from model_folders import edit
from tiny_job import SilentView
from transformers import AutoConfig

from pagedbatch.config import EngineConfig
from pagedbatch.engine.engine import Engine
from pagedbatch.errors import UsageError
from pagedbatch.model.context_length import context_length
from pagedbatch.model.model_defaults import model_defaults
from pagedbatch.params import GenerationParams
from pagedbatch.run.job import run_job
from pagedbatch.sequence import Request
from pagedbatch.settings import merge


def config(model_type: str = "llama", **settings: Any) -> Any:
    return AutoConfig.for_model(model_type, **settings)


def scaled(longest: int, kind: str, factor: float, original: int | None = None, **more: Any) -> Any:
    """A Llama with a rotary scaling, written as model cards write it."""
    rope = {"type": kind, "factor": factor, **more}
    if original is not None:
        rope["original_max_position_embeddings"] = original
    return config(max_position_embeddings=longest, rope_scaling=rope, rope_theta=1e4, head_dim=16)


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("longest", "kind", "factor", "original", "tokens"),
    [
        (256, "yarn", 4.0, 256, 1024),  # Qwen2.5's card
        (40960, "yarn", 4.0, 32768, 131072),  # Qwen3's: what was there is neither the one nor the other
        (131072, "yarn", 32.0, 4096, 131072),  # gpt-oss: scaled already
        (32768, "yarn", 16.0, 8192, 131072),  # Yarn-Mistral
        (256, "yarn", 4.0, None, 1024),
        (40960, "yarn", 1.0, 32768, 40960),
        (4096, "linear", 4.0, None, 16384),  # Vicuna 16k
        (4096, "linear", 4.0, 4096, 16384),
        (16384, "linear", 4.0, 4096, 16384),
        (4096, "linear", 2.5, None, 10240),
        (131072, "llama3", 8.0, 8192, 131072),  # Llama 3.1: 8 times 8192 is not its length
        (131072, "llama3", 32.0, 8192, 131072),  # Llama 3.2
        (8192, "llama3", 8.0, 8192, 65536),
        (512, "dynamic", 4.0, 128, 128),
        (512, "dynamic", 4.0, None, 512),
    ],
)
def test_the_length_that_a_scaling_gives(
    longest: int, kind: str, factor: float, original: int | None, tokens: int
) -> None:
    more = LLAMA3 if kind == "llama3" else {}
    assert context_length(scaled(longest, kind, factor, original, **more)).tokens == tokens


def test_longrope_keeps_to_the_original_length() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    assert context_length(scaled(131072, "longrope", 32.0, 4096, **factors)).tokens == 4096


def test_scalings_that_count_for_some_layers_alone_leave_the_length() -> None:
    """Gemma 3 names its length after the scaling, which only its full layers have."""
    gemma = config("gemma3_text", max_position_embeddings=131072, rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert context_length(gemma).tokens == 131072


def test_the_length_of_positions_in_a_table() -> None:
    assert context_length(config("gpt2", n_positions=128)).tokens == 128


def test_a_length_that_is_asked_for() -> None:
    length = context_length(config(max_position_embeddings=512))
    assert [length.max_model_len(asked) for asked in (None, 100, 512, 4096)] == [512, 100, 512, 4096]


@pytest.mark.parametrize(
    ("model", "longest"),
    [
        (config("gpt2", n_positions=128), 128),
        (config("opt", max_position_embeddings=128), 128),
        (config("gptj", n_positions=128), 128),
        (scaled(512, "dynamic", 4.0, 128), 128),
    ],
    ids=["gpt2", "opt", "gptj", "dynamic"],
)
def test_where_nothing_lies_beyond_the_length(model: Any, longest: int) -> None:
    length = context_length(model)
    assert length.max_model_len(longest - 1) == longest - 1
    with pytest.raises(UsageError, match=f"--max-model-len {longest + 1}: this model's limit is {longest} tokens, as "):
        length.max_model_len(longest + 1)


def test_more_than_the_config_says_is_told(rand_model_path: Path) -> None:
    assert model_defaults(str(rand_model_path), asked_model_len=512).remarks == ()
    defaults = model_defaults(str(rand_model_path), asked_model_len=600)
    assert defaults.max_model_len == 600
    assert defaults.remarks == (
        "--max-model-len 600 is more than the 512 tokens of this model's config: what is beyond may be poor",
    )


@pytest.fixture(scope="module")
def yarn_path(rand_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = Path(shutil.copytree(rand_model_path, tmp_path_factory.mktemp("yarn") / "model"))
    raw = json.loads((path / "config.json").read_text())
    del raw["rope_parameters"]
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    raw |= {"max_position_embeddings": 256, "rope_theta": 1e4, "rope_scaling": yarn}
    (path / "config.json").write_text(json.dumps(raw))
    return path


@pytest.mark.parametrize("forward", ["auto", "hf"])
def test_logits_beyond_the_original_length(yarn_path: Path, forward: Any) -> None:
    """The prompt has 302 tokens where 256 were the original."""
    loaded = paged_model(yarn_path)
    assert loaded.defaults.max_model_len == 1024
    prompt = [1, *(4 + i * 7 % 250 for i in range(301))]
    runner = RecordingRunner.create(loaded, forward=forward, num_blocks=64)
    assert isinstance(runner, RecordingRunner)
    engine = Engine(EngineConfig(num_blocks=64, max_num_batched_tokens=100, max_model_len=1024), runner)
    engine.add(Request(0, prompt, GenerationParams(max_tokens=4, ignore_eos=True)))
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step().finished
    token_ids = outputs[0].outputs[0].token_ids
    assert len(token_ids) == 4
    with torch.inference_mode():
        wanted = hf_model(yarn_path)(torch.tensor([prompt + token_ids])).logits[0]
    for position in range(4):
        found = runner.seen[302 + position, (0,)]
        torch.testing.assert_close(found, wanted[301 + position], atol=5e-5, rtol=0)


class Job:
    """A row of so many letters, answered again and again."""

    def __init__(self, folder: Path, model: Path, letters: int) -> None:
        (folder / "in.jsonl").write_text(json.dumps({"prompt": "x" * letters}) + "\n")
        self.output = folder / "out.jsonl"
        self._given = {"input": str(folder / "in.jsonl"), "output": str(self.output), "model": str(model)}
        self.notices: list[str] = []

    def run(self, **settings: Any) -> dict[str, Any]:
        given = {**self._given, "max_tokens": 2, "num_blocks": 64, **settings}
        with log_lines(self.notices):
            run_job(merge(given, {}), lambda *_: SilentView())
        record: dict[str, Any] = json.loads(self.output.read_text())
        return record


def test_a_run_of_a_length(rand_model_path: Path, tmp_path: Path) -> None:
    job = Job(tmp_path, rand_model_path, letters=530)
    assert "the model's limit of 512" in job.run()["error"]
    assert job.run(max_model_len=600, restart=True)["status"] == "ok"
    assert any("--max-model-len 600 is more than the 512" in notice for notice in job.notices)
    assert "the model's limit of 530" in job.run(max_model_len=530, restart=True)["error"]


def test_a_manifest_holds_the_length_only_where_it_is_asked_for(rand_model_path: Path, tmp_path: Path) -> None:
    """Those that earlier versions wrote lack it, and are resumed."""
    job = Job(tmp_path, rand_model_path, letters=530)
    kept = tmp_path / "out.jsonl.finished"  # as the row is an error
    job.run()
    assert b"max_model_len" not in kept.read_bytes()
    assert b"ignore_adapter" not in kept.read_bytes()
    job.run(max_model_len=520, restart=True)
    assert b'"max_model_len": 520' in kept.read_bytes()


@pytest.mark.parametrize("value", [1, 0, -5, 2**31, "512", 1.5, True])
def test_a_length_that_is_none(value: Any) -> None:
    with pytest.raises(UsageError, match="--max-model-len must"):
        merge({"input": "a", "output": "b", "model": "c", "max_model_len": value}, {})


def test_the_length_of_a_config_is_used_where_none_is_asked(yarn_path: Path, tmp_path: Path) -> None:
    shutil.copytree(yarn_path, tmp_path / "model")
    edit(tmp_path / "model" / "config.json", rope_scaling=None)
    assert model_defaults(str(tmp_path / "model")).max_model_len == 256
    assert model_defaults(str(yarn_path)).max_model_len == 1024

"""`pagedbatch doctor` tells from the files whether a model runs, and what is missing when it doesn't."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from model_folders import edit, edit_weights
from transformers import AutoConfig
from typer.testing import CliRunner

from pagedbatch.cli.app import app
from pagedbatch.model.context_length import max_model_len
from pagedbatch.model.model_config import model_facts
from pagedbatch.model.support import common_window, sliding_windows, unsupported_reason


def test_a_supported_model(rand_model_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", "--model", str(rand_model_path)])
    assert result.exit_code == 0
    assert "runs here" in result.output
    assert "2 layers, 4 heads, 2 KV heads of size 16" in result.output
    assert "512 bytes in float32" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("t5", "cross-attention is not supported"),
        ("bloom", "ALiBi"),
        ("mpt", "ALiBi"),
        ("mamba", "linear_attention layers"),
        ("jamba", "linear_attention layers"),
        ("falcon_h1", "hybrid layers"),
        ("qwen3_next", "linear_attention layers"),
        ("llama4_text", "chunked_attention layers"),
        ("deepseek_v3", r"MLA"),
        ("lfm2", "not been compared"),
    ],
)
def test_what_is_missing_is_said_in_words(model_type: str, reason: str) -> None:
    missing = unsupported_reason(AutoConfig.for_model(model_type))
    assert missing is not None
    assert reason in missing


def test_windows_come_from_the_layer_types() -> None:
    config = AutoConfig.for_model("gemma2", num_hidden_layers=4, sliding_window=64)
    assert sliding_windows(config) == [64, None, 64, None]
    assert model_facts(config).windows == {64: 2}
    assert model_facts(config).softcap == 50.0
    assert sliding_windows(AutoConfig.for_model("mistral", num_hidden_layers=2, sliding_window=9)) == [9, 9]
    assert sliding_windows(AutoConfig.for_model("qwen2", num_hidden_layers=2)) == [None, None]


def test_a_window_is_common_when_every_layer_has_one() -> None:
    assert common_window(AutoConfig.for_model("mistral", num_hidden_layers=2, sliding_window=9)) == 9
    assert common_window(AutoConfig.for_model("gemma2", num_hidden_layers=2, sliding_window=9)) is None
    assert common_window(AutoConfig.for_model("llama")) is None


def test_batch_dependent_rotary_scaling_keeps_to_the_original_length() -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 128}
    config = AutoConfig.for_model("llama", max_position_embeddings=512, rope_parameters=rope)
    assert max_model_len(config) == 128
    assert max_model_len(AutoConfig.for_model("llama", max_position_embeddings=512)) == 512


def doctor(path: Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["doctor", "--model", str(path)], env={"COLUMNS": "300"}, standalone_mode=False)
    return result.return_value, " ".join(result.output.split())


@pytest.fixture
def folder(rand_model_path: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(rand_model_path, tmp_path / "model"))


def test_what_was_looked_at(folder: Path) -> None:
    assert "verdict runs here weights 21 tensors in 1 file" in doctor(folder)[1]
    (folder / "model.safetensors").unlink()
    exit_code, output = doctor(folder)
    assert exit_code == 0
    assert "verdict would run here, by its config; there are no weights to check" in output


def test_every_problem_is_told(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({"score.weight": torch.ones(2)}))
    (folder / "adapter_config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{")
    edit(folder / "generation_config.json", num_beams="many")
    exit_code, output = doctor(folder)
    assert exit_code == 1
    assert "runs here weights" not in output
    for problem in (
        "verdict can't run here: model",
        "beside them an adapter",
        "would not be used: score.weight",
        "tokenizer.json can't be loaded: malformed JSON",
        "generation_config.json: num_beams is refused",
    ):
        assert problem in output


def test_a_model_without_words_for_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    exit_code, output = doctor(tmp_path)
    assert exit_code == 1
    assert "can't run here: it has linear_attention layers" in output


def test_how_the_limit_comes_about(folder: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 256}
    edit(folder / "config.json", max_position_embeddings=256, rope_parameters=rope)
    assert "limit 1024 tokens per sequence (256 scaled by 4 (yarn))" in doctor(folder)[1]

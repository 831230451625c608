"""`pagedbatch doctor` tells from the files whether a model runs, and what is missing when it doesn't."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from model_folders import edit, edit_weights
from typer.testing import CliRunner

from pagedbatch.cli.app import app


def test_a_supported_model(rand_model_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", "--model", str(rand_model_path)])
    assert result.exit_code == 0
    assert "runs here" in result.output
    assert "2 layers, 4 heads, 2 KV heads of size 16" in result.output
    assert "512 bytes in float32" in " ".join(result.output.split())


def doctor(path: Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["doctor", "--model", str(path)], standalone_mode=False)
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

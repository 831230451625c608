"""What a model folder says about itself, and one line for each way in which it can be wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import run_engine

from pagedbatch.errors import UnsupportedModelError, UsageError
from pagedbatch.model.hf_config import load_config
from pagedbatch.model.loader import has_fast_bfloat16, load_model
from pagedbatch.model.model_config import ModelConfig
from pagedbatch.model.model_defaults import model_defaults
from pagedbatch.model.tokenizer import load_tokenizer
from pagedbatch.params import GenerationParams
from pagedbatch.sequence import Request


@pytest.fixture
def model_copy(rand_model_path: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(rand_model_path, tmp_path / "copy"))


def edit(path: Path, **changes: Any) -> None:
    """Changes keys of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def one_line_error(kind: type[UsageError], path: str | Path) -> str:
    with pytest.raises(kind) as caught:
        load_model(str(path), dtype="float32", device="cpu")
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_missing_folder(tmp_path: Path) -> None:
    assert "no such folder" in one_line_error(UsageError, tmp_path / "nowhere")


def test_missing_gguf_file(tmp_path: Path) -> None:
    assert "no such file" in one_line_error(UsageError, tmp_path / "nothing.gguf")


def test_folder_without_config(tmp_path: Path) -> None:
    assert str(tmp_path) in one_line_error(UsageError, tmp_path)


def test_folder_without_tokenizer(model_copy: Path) -> None:
    for path in model_copy.glob("*token*"):
        path.unlink()
    with pytest.raises(UsageError, match="can't be loaded"):
        load_tokenizer(str(model_copy))


def test_pickled_weights_are_refused(model_copy: Path) -> None:
    (model_copy / "model.safetensors").unlink()
    torch.save({"model.embed_tokens.weight": torch.zeros(1)}, model_copy / "pytorch_model.bin")
    assert "can't be loaded" in one_line_error(UsageError, model_copy)


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1", None])
def test_weights_that_are_no_weights(model_copy: Path, content: bytes | None) -> None:
    """Empty, a pointer of git-lfs, and a download that was cut."""
    weights = model_copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000] if content is None else content)
    assert "can't be loaded" in one_line_error(UsageError, model_copy)


def test_weights_that_do_not_fill_the_model(model_copy: Path) -> None:
    """Transformers would fill the third layer with random numbers."""
    edit(model_copy / "config.json", num_hidden_layers=3)
    assert "missing: model.layers.2." in one_line_error(UsageError, model_copy)


def test_weights_of_another_shape(model_copy: Path) -> None:
    edit(model_copy / "config.json", intermediate_size=96)
    assert "another shape than its config says: model.layers.0.mlp" in one_line_error(UsageError, model_copy)


@pytest.mark.parametrize("model_type", ["bert", "mamba", "never-heard-of"])
def test_other_model_types_are_refused(model_copy: Path, model_type: str) -> None:
    edit(model_copy / "config.json", model_type=model_type)
    assert model_type in one_line_error(UsageError, model_copy)


def test_other_encoder_decoders_are_refused(model_copy: Path) -> None:
    edit(model_copy / "config.json", model_type="longt5", is_encoder_decoder=True, num_layers=1, d_model=64)
    assert "longt5" in one_line_error(UnsupportedModelError, model_copy)


def test_end_tokens_are_those_of_the_generation_config(rand_model_path: Path) -> None:
    assert model_defaults(str(rand_model_path)).eos_token_ids == {2, 3}


def test_end_token_of_the_config_where_there_is_no_generation_config(model_copy: Path) -> None:
    (model_copy / "generation_config.json").unlink()
    assert model_defaults(str(model_copy)).eos_token_ids == {2}


def test_generation_config_that_cannot_be_read_is_an_error(model_copy: Path) -> None:
    """Going on without it would lose end tokens."""
    (model_copy / "generation_config.json").write_text("{")
    with pytest.raises(UsageError, match="generation_config"):
        model_defaults(str(model_copy))


def test_sampling_defaults_count_only_where_the_model_samples(
    model_copy: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    values = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05}
    edit(model_copy / "generation_config.json", do_sample=True, **values)
    assert model_defaults(str(model_copy)).generation.values == values
    edit(model_copy / "generation_config.json", do_sample=False)
    assert model_defaults(str(model_copy)).generation.values == {}
    assert capfd.readouterr().err == ""


def test_loading_is_silent(model_copy: Path, capfd: pytest.CaptureFixture[str]) -> None:
    edit(model_copy / "generation_config.json", do_sample=False, temperature=0.6)
    load_tokenizer(str(model_copy))
    load_model(str(model_copy), dtype="float32", device="cpu")
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""


def test_model_without_end_tokens_runs_to_the_limit(model_copy: Path) -> None:
    edit(model_copy / "generation_config.json", eos_token_id=None)
    edit(model_copy / "config.json", eos_token_id=None)
    assert model_defaults(str(model_copy)).eos_token_ids == frozenset()
    kinds = [GenerationParams(max_tokens=9, min_tokens=4), GenerationParams(num_beams=3, n=3, max_tokens=9)]
    run = run_engine(model_copy, [Request(i, [1, 50], params) for i, params in enumerate(kinds)])
    assert [len(ids) for outputs in run.token_ids().values() for ids in outputs] == [9] * 4


def test_config_without_head_dim(model_copy: Path) -> None:
    expected = ModelConfig.from_hf(load_config(str(model_copy)))
    edit(model_copy / "config.json", head_dim=None)
    assert ModelConfig.from_hf(load_config(str(model_copy))) == expected


def test_dtype(rand_model_path: Path) -> None:
    automatic = torch.bfloat16 if has_fast_bfloat16() else torch.float32
    for name, dtype in (("auto", automatic), ("float16", torch.float16), ("bfloat16", torch.bfloat16)):
        loaded = load_model(str(rand_model_path), dtype=name, device="cpu")
        assert loaded.dtype == dtype
        assert {p.dtype for p in loaded.model.parameters()} == {dtype}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_that_is_not_there(rand_model_path: Path) -> None:
    with pytest.raises(UsageError, match="no GPU"):
        load_model(str(rand_model_path), dtype="auto", device="cuda")

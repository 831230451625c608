"""Quantised checkpoints: what they need is told, and their layers keep the forward of transformers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import hf_model
from model_folders import command, edit, edit_weights, load_all, refusal
from torch import Tensor, nn
from torch.nn.utils import parametrize

from pagedbatch.model.forward import ForwardName
from pagedbatch.model.inspection import inspect_model
from pagedbatch.model.library_errors import is_installed
from pagedbatch.model.llama_forward import can_run_fused
from pagedbatch.model.runner import ModelRunner

FP8 = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {
                "num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True,
            },
        }
    },
}  # fmt: skip


@pytest.fixture
def folder(rand_model_path: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(rand_model_path, tmp_path / "model"))


@pytest.fixture
def fp8(folder: Path) -> Path:
    """The random Llama in FP8, with a scale a channel, as llm-compressor writes it."""

    def quantise(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("proj.weight")]:
            scale = tensors[name].abs().amax(1, keepdim=True) / 448
            tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale"] = scale

    edit_weights(folder, quantise)
    edit(folder / "config.json", quantization_config=FP8)
    return folder


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"quant_method": "modelopt"}, 'its quantisation, "modelopt", is none that transformers loads'),
        ({"quant_method": None}, "quantization_config.quant_method must be a text, got null"),
        ({"quant_method": [1]}, "quantization_config.quant_method must be a text, got [1]"),
        ({}, "quantization_config.quant_method must be a text, got null"),
        ({"quant_method": "gptq", "bits": 4}, "its quantisation, gptq, needs a package: pip install gptqmodel optimum"),
        ({"quant_method": "awq"}, "its quantisation, awq, needs a package: pip install gptqmodel"),
        ({"load_in_4bit": True}, "its quantisation, bitsandbytes, needs a package: pip install bitsandbytes"),
        (FP8, "its quantisation, compressed-tensors, needs a package: pip install compressed-tensors"),
    ],
    ids=str,
)
def test_what_a_quantisation_needs(
    folder: Path, settings: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagedbatch.model.quantization.is_installed", lambda _: False)
    edit(folder / "config.json", quantization_config=settings)
    assert reason in refusal(folder)
    assert reason in inspect_model(str(folder)).problems[0]


def test_doctor_tells_of_it(folder: Path) -> None:
    edit(folder / "config.json", quantization_config={"quant_method": "modelopt"})
    exit_code, errors = command("doctor", "-m", folder)
    assert (exit_code, errors) == (1, "")


needs_library = pytest.mark.skipif(not is_installed("compressed_tensors"), reason="compressed-tensors is not installed")


@needs_library
def test_compressed_tensors_answer_as_in_transformers(fp8: Path) -> None:
    loaded = load_all(fp8)
    runner = ModelRunner.create(loaded, num_blocks=64)
    assert runner.forward_name == "hf"
    from pagedbatch.config import EngineConfig
    from pagedbatch.engine.engine import Engine
    from pagedbatch.params import GenerationParams
    from pagedbatch.sequence import Request

    prompt = [1, 50, 60, 70]
    engine = Engine(EngineConfig(num_blocks=64), runner)
    engine.add(Request(0, prompt, GenerationParams(max_tokens=8, ignore_eos=True)))
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step().finished
    token_ids = outputs[0].outputs[0].token_ids
    with torch.inference_mode():
        logits = hf_model(fp8)(torch.tensor([prompt + token_ids])).logits[0]
    assert logits.argmax(-1).tolist()[3:-1] == token_ids


@needs_library
def test_a_scale_that_is_missing_is_found_without_reading_weights(fp8: Path) -> None:
    edit_weights(fp8, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight_scale"))
    assert "weights are missing: model.layers.1.mlp.up_proj.weight_scale" in refusal(fp8)
    assert "up_proj.weight_scale" in inspect_model(str(fp8)).problems[0]


class Doubled(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def _wrap_forward(linear: nn.Linear) -> None:
    linear.forward = lambda rows: nn.functional.linear(rows, linear.weight)  # type: ignore[method-assign]


def _store_in_8_bits(linear: nn.Linear) -> None:
    linear.weight = nn.Parameter(linear.weight.to(torch.float8_e4m3fn), requires_grad=False)


def _store_in_16_bits(linear: nn.Linear) -> None:
    linear.weight = nn.Parameter(linear.weight.half(), requires_grad=False)


def _add_scale(linear: nn.Linear) -> None:
    linear.weight_scale = nn.Parameter(torch.ones(1), requires_grad=False)  # type: ignore[assignment]


def _add_buffer(linear: nn.Linear) -> None:
    linear.register_buffer("weight_scale", torch.ones(1))


def _hook_before(linear: nn.Linear) -> None:
    linear.register_forward_pre_hook(lambda _, rows: rows)


def _hook_after(linear: nn.Linear) -> None:
    linear.register_forward_hook(lambda *_: None)


def _parametrize(linear: nn.Linear) -> None:
    parametrize.register_parametrization(linear, "weight", Doubled())


def _change_class(linear: nn.Linear) -> None:
    linear.__class__ = type("QuantLinear", (nn.Linear,), {})


CHANGES = [
    _wrap_forward,
    _store_in_8_bits,
    _store_in_16_bits,
    _add_scale,
    _add_buffer,
    _hook_before,
    _hook_after,
    _parametrize,
    _change_class,
]


def _layers(model: Any) -> Iterator[nn.Linear]:
    yield model.lm_head
    for layer in model.model.layers:
        yield from (module for module in layer.modules() if isinstance(module, nn.Linear))


@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_that_is_more_than_its_weight_keeps_the_hf_forward(rand_model_path: Path, change: Any) -> None:
    for number in (0, 3, 14):
        model = load_all(rand_model_path).model
        assert can_run_fused(model)
        change(list(_layers(model))[number])
        assert not can_run_fused(model)


@pytest.mark.parametrize("change", [_wrap_forward, _hook_after])
def test_so_does_any_other_module(rand_model_path: Path, change: Any) -> None:
    for name in ("", "model", "model.embed_tokens", "model.norm", "model.layers.1", "model.layers.0.self_attn"):
        model = load_all(rand_model_path).model
        change(model.get_submodule(name))
        assert not can_run_fused(model)


@pytest.mark.parametrize("forward", ["auto", "hf"])
def test_a_quantised_layer_computes_what_it_does_in_the_library(rand_model_path: Path, forward: ForwardName) -> None:
    """A stand-in for a quantiser's layers: eight bits in the weight, and a forward of its own."""
    loaded = load_all(rand_model_path)
    for linear in _layers(loaded.model):
        weight = linear.weight.detach()
        scale = weight.abs().amax(1, keepdim=True) / 448
        linear.weight = nn.Parameter((weight / scale).to(torch.float8_e4m3fn), requires_grad=False)
        linear.forward = lambda rows, linear=linear, scale=scale: (  # type: ignore[method-assign]
            nn.functional.linear(rows, linear.weight.float() * scale)
        )
    runner = ModelRunner.create(loaded, forward=forward, num_blocks=32)
    assert runner.forward_name == "hf"

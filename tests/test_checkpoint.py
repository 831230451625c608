"""A checkpoint and its config that are not of one model: refused by the names of the tensors, before one is read."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from families import COMMON, FAMILIES, GQA_KEYS, MHA_ONLY
from model_folders import command, edit, edit_weights, load_all, refusal
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from pagedbatch.model import loader
from pagedbatch.model.inspection import inspect_model
from pagedbatch.model.weight_files import holds_weights

LAYERS = "model.layers.{}.self_attn.{}_proj.{}"


@pytest.fixture
def folder(rand_model_path: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(rand_model_path, tmp_path / "model"))


def refused(folder: Path) -> str:
    """The line with which a model is refused before a weight is read."""
    with patch.object(AutoModelForCausalLM, "from_pretrained", side_effect=AssertionError("the weights are read")):
        return refusal(folder)


def add(*names: str, shape: tuple[int, ...] = (64,)) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: torch.ones(shape) for name in names})


def quantise(tensors: dict[str, Tensor]) -> None:
    """FP8 with a scale a channel, as modelopt writes it."""
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        scale = tensors[name].abs().amax(1, keepdim=True) / 448
        tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = scale
        tensors[name.replace("weight", "input_scale")] = torch.ones(1)


def test_scales_that_the_config_does_not_tell_of(folder: Path) -> None:
    edit_weights(folder, quantise)
    message = refused(folder)
    assert "28 of its tensors would not be used: model.layers.0.mlp.down_proj.input_scale, " in message
    assert message.endswith(
        f"the checkpoint is quantised, and {folder}/config.json has no quantization_config that says so"
    )
    (folder / "hf_quant_config.json").write_text("{}")
    assert refused(folder).endswith("(hf_quant_config.json does, which transformers doesn't read)")


@pytest.mark.parametrize(
    "name",
    [
        "weight_scale_inv",
        "weight_packed",
        "qweight",
        "qzeros",
        "scales",
        "g_idx",
        "weight.absmax",
        "weight.quant_map",
        "SCB",
    ],
)
def test_what_other_quantisers_leave(folder: Path, name: str) -> None:
    edit_weights(folder, add(f"model.layers.0.mlp.up_proj.{name}"))
    assert f"mlp.up_proj.{name}; the checkpoint is quantised" in refused(folder)


def test_biases_that_the_config_denies(folder: Path) -> None:
    edit_weights(folder, add(*(LAYERS.format(layer, name, "bias") for layer in (0, 1) for name in "qkv")))
    message = refused(folder)
    assert "6 of its tensors would not be used: model.layers.0.self_attn.k_proj.bias" in message
    assert "says that these layers have no bias" in message


def test_layers_beyond_those_that_the_config_counts(folder: Path) -> None:
    edit(folder / "config.json", num_hidden_layers=1)
    message = refused(folder)
    assert "9 of its tensors would not be used: model.layers.1.input_layernorm.weight" in message
    assert message.endswith("config.json says num_hidden_layers 1, and the checkpoint holds more")


def test_layers_that_the_library_drops_for_another_checkpoint_of_the_family(tmp_path: Path) -> None:
    """For GLM-4.5's sake it drops layer 46 of every such model."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_attention_heads": 2}
    config = AutoConfig.for_model(
        "glm4_moe", vocab_size=64, num_hidden_layers=2, num_key_value_heads=1, head_dim=16, n_routed_experts=2,
        num_experts_per_tok=1, pad_token_id=0, **sizes,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    loader.check_weights(str(tmp_path))
    edit_weights(tmp_path, add("model.layers.46.self_attn.q_proj.weight"))
    with pytest.raises(loader.UsageError, match=r"layers\.46\.self_attn\.q_proj\.weight"):
        loader.check_weights(str(tmp_path))
    edit(tmp_path / "config.json", num_nextn_predict_layers=45)
    loader.check_weights(str(tmp_path))


def test_tensors_of_another_model(folder: Path) -> None:
    edit_weights(folder, add("score.weight", "h.extra"))
    assert "2 of its tensors would not be used: h.extra, score.weight" in refused(folder)


def test_missing_and_misfitting_tensors_come_first(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.pop("model.norm.weight"))
    assert "weights are missing: model.norm.weight" in refused(folder)
    edit(folder / "config.json", intermediate_size=96)
    assert "another shape than its config says: model.layers.0.mlp.down_proj.weight (stored 64x128, wanted 64x96)" in (
        refused(folder)
    )


def test_sizes_that_no_memory_holds_are_compared_all_the_same(folder: Path) -> None:
    edit(folder / "config.json", intermediate_size=2**24)
    assert "(stored 64x128, wanted 64x16777216)" in refused(folder)


def test_integers_without_what_scales_them(folder: Path) -> None:
    def round_down(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)

    edit_weights(folder, round_down)
    assert "weights are stored as integers: lm_head.weight" in refused(folder)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.rotary_emb.inv_freq",
        "transformer.h.0.attn.masked_bias",
        "gpt_neox.layers.0.attention.bias",
        "model.embeddings.position_ids",
        "v_head.summary.weight",
        "mtp.layers.0.eh_proj.weight",
        "model.mtp_block.0.linear_proj.weight",
        "model.layers.0.self_attn.k_scale",
        "model.layers.0.self_attn.v_proj.v_scale",
        "vision_tower.vision_model.encoder.layers.9.mlp.fc1.weight",
        "multi_modal_projector.mm_input_projection_weight",
    ],
)
def test_what_is_known_to_be_harmless_changes_nothing(rand_model_path: Path, folder: Path, name: str) -> None:
    edit_weights(folder, add(name))
    wanted = load_all(rand_model_path).model.state_dict()
    found = load_all(folder).model.state_dict()
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[key], found[key]) for key in wanted)


def test_a_tied_head_may_be_stored(folder: Path) -> None:
    edit(folder / "config.json", tie_word_embeddings=True)
    edit_weights(
        folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    )
    head = load_all(folder).model.lm_head.weight
    assert torch.equal(head, load_file(folder / "model.safetensors")["model.embed_tokens.weight"])


def test_the_check_without_accelerate_is_that_of_the_weights_themselves(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library needs that package to load without values."""
    monkeypatch.setattr("pagedbatch.model.checkpoint.is_installed", lambda _: False)
    load_all(folder)
    edit_weights(folder, add("score.weight"))
    with pytest.raises(loader.UsageError, match=r"would not be used: score\.weight"):
        loader.load_model(str(folder), dtype="float32", device="cpu")


def adapter_in(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base", "peft_type": "LORA", "r": 4}')
    save_file({"base_model.model.lm_head.lora_A.weight": torch.ones(4, 64)}, folder / "adapter_model.safetensors")


@pytest.fixture
def peft(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The library as it is where peft is installed. Holds the adapters that it was about to load."""
    found: list[str] = []

    def load_adapter(self: Any, path: str, **_: Any) -> Any:
        found.append(path)
        raise AssertionError(f"the adapter in {path} is loaded")

    for module in ("transformers.integrations.peft", "transformers.models.auto.auto_factory"):
        monkeypatch.setattr(f"{module}.is_peft_available", lambda: True)
    monkeypatch.setattr("transformers.PreTrainedModel.load_adapter", load_adapter)
    return found


def test_an_adapter_beside_the_weights_is_refused(folder: Path) -> None:
    adapter_in(folder)
    message = refusal(folder)
    assert "holds weights and beside them an adapter (adapter_config.json)" in message
    assert "--ignore-adapter takes the weights alone" in message
    assert "base model (of org/base)" in message


@pytest.mark.parametrize("with_peft", [False, True])
def test_an_adapter_that_is_ignored_changes_nothing(
    rand_model_path: Path, folder: Path, with_peft: bool, request: pytest.FixtureRequest
) -> None:
    if with_peft:
        request.getfixturevalue("peft")
    adapter_in(folder)
    wanted = load_all(rand_model_path).model.state_dict()
    found = load_all(folder, ignore_adapter=True).model.state_dict()
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)


def test_with_peft_the_library_would_load_the_adapter(folder: Path, peft: list[str]) -> None:
    adapter_in(folder)
    with pytest.raises(AssertionError, match="the adapter in"):
        AutoModelForCausalLM.from_pretrained(folder)
    assert [Path(path) for path in peft] == [folder]


@pytest.mark.parametrize(("flags", "exit_code"), [([], 2), (["--ignore-adapter"], 0)])
def test_the_flag(folder: Path, flags: list[str], exit_code: int) -> None:
    adapter_in(folder)
    (folder / "in.jsonl").write_text('{"prompt": "a"}\n')
    arguments = [folder / "in.jsonl", "-m", folder, "-o", folder / "out.jsonl", "--max-tokens", "2"]
    found, errors = command("run", *arguments, *flags)
    assert found == exit_code, errors
    assert (folder / "out.jsonl").exists() == (exit_code == 0)


@pytest.mark.parametrize("subcommand", ["run", "plan", "doctor"])
def test_every_command_tells_of_tensors_that_would_not_be_used(folder: Path, subcommand: str) -> None:
    edit_weights(folder, quantise)
    (folder / "in.jsonl").write_text('{"prompt": "a"}\n')
    arguments = {
        "run": [folder / "in.jsonl", "-o", folder / "out.jsonl"],
        "plan": [folder / "in.jsonl"],
        "doctor": [],
    }[subcommand]
    exit_code, errors = command(subcommand, *arguments, "-m", folder)
    assert exit_code == (1 if subcommand == "doctor" else 2)
    if subcommand != "doctor":  # which prints its verdict
        assert "28 of its tensors would not be used" in errors
        assert errors.count("\n") == 1
    assert not (folder / "out.jsonl").exists()


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_whole_checkpoint_of_each_family_passes(family: str, tmp_path: Path) -> None:
    """As it is stored, which for experts is not as the model holds it."""
    common = {name: value for name, value in COMMON.items() if not (family in MHA_ONLY and name in GQA_KEYS)}
    config = AutoConfig.for_model(family, **{**common, **FAMILIES[family]})
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    assert holds_weights(tmp_path)
    loader.check_weights(str(tmp_path))
    assert inspect_model(str(tmp_path)).config is not None
    edit_weights(tmp_path, add("model.layers.0.more.weight"))
    with pytest.raises(loader.UsageError, match=r"layers\.0\.more\.weight"):
        loader.check_weights(str(tmp_path))

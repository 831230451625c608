"""A model's files with something wrong: one line that names the file, the key and what to do."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from model_folders import LFS_POINTER, command, edit, load_all, refusal, shard

from pagedbatch.config import EngineConfig
from pagedbatch.engine.engine import Engine
from pagedbatch.errors import UsageError
from pagedbatch.model.model_defaults import model_defaults
from pagedbatch.model.runner import ModelRunner
from pagedbatch.params import GenerationParams
from pagedbatch.sequence import Request

YARN = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}
LONG = {"rope_type": "longrope", "factor": 2.0, "original_max_position_embeddings": 256, "long_factor": [1.0] * 8}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}


@pytest.fixture
def folder(rand_model_path: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(rand_model_path, tmp_path / "model"))


@pytest.mark.parametrize(
    "changes",
    [
        {"rms_norm_eps": None},
        {"rms_norm_eps": "1e-6"},
        {"rms_norm_eps": -1.0},
        {"rms_norm_eps": math.nan},
        {"num_key_value_heads": 0},
        {"num_key_value_heads": 3},
        {"num_key_value_heads": "2"},
        {"num_attention_heads": 3},
        {"num_attention_heads": None},
        {"hidden_act": None},
        {"hidden_act": "swoosh"},
        {"hidden_act": ["silu"]},
        {"hidden_size": "64"},
        {"hidden_size": 64.5},
        {"hidden_size": -64},
        {"hidden_size": True},
        {"hidden_size": 10**15},
        {"intermediate_size": 0},
        {"num_hidden_layers": 0},
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": None},
        {"head_dim": 0},
        {"head_dim": 15},
        {"vocab_size": None},
        {"vocab_size": -1},
        {"vocab_size": 10**12},
        {"max_position_embeddings": 0},
        {"max_position_embeddings": 10**30},
        {"rope_theta": 0},
        {"sliding_window": -1},
        {"rope_scaling": []},
        {"rope_scaling": "yarn"},
        {"rope_scaling": {"rope_type": "spiral", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 0}},
        {"rope_scaling": {"rope_type": "linear", "factor": "2"}},
        {"rope_parameters": [1]},
        {"rope_parameters": YARN | {"factor": math.inf}},
        {"rope_parameters": YARN | {"original_max_position_embeddings": 0}},
        {"rope_parameters": LONG | {"short_factor": [1.0] * 7}},
        {"rope_parameters": LONG | {"short_factor": "1"}},
        {"rope_parameters": LLAMA3 | {"low_freq_factor": 4.0, "high_freq_factor": 4.0}},
        {"layer_types": "full_attention"},
        {"layer_types": ["full_attention"]},
        {"dtype": "bfloat17"},
        {"dtype": 16},
        {"dtype": "save"},
        {"eos_token_id": "2"},
        {"pad_token_id": 5000},
        {"model_type": None},
        {"model_type": ["llama"]},
        {"model_type": "llamma"},
        {"architectures": "LlamaForCausalLM"},
        {"text_config": []},
        {"text_config": {}},
        {"quantization_config": []},
        {"tie_word_embeddings": None},
        {"tie_word_embeddings": "yes"},
        {"attention_bias": "no"},
        {"id2label": 5},
        {"transformers_weights": [1]},
        {"attention_dropout": math.nan},
        {"resid_pdrop": 7},
        {"topk_group": -1},
        {"moe_k": None},
    ],
    ids=lambda changes: f"{changes}"[1:50],
)
def test_a_config_that_no_model_can_have(folder: Path, changes: dict[str, Any]) -> None:
    edit(folder / "config.json", eos_token_id=2)
    edit(folder / "generation_config.json", eos_token_id=None)
    edit(folder / "config.json", **changes)
    message = refusal(folder)
    (key,) = changes
    # transformers keeps rope_scaling as rope_parameters, and its own checks of sizes name no key
    named = {"rope_scaling": "rope_", "rope_parameters": "_", "id2label": "int", "num_attention_heads": "heads"}
    assert f"{folder}/config.json" in message
    assert named.get(key, key).replace("_", " ") in message.replace("_", " ")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is empty"),
        (b" \n", "it is empty"),
        (LFS_POINTER, "git lfs pull"),
        (b'{"model_type": "lla', "cut off?"),
        (b'["llama"]', "holds a list"),
        (b"null", "holds null"),
        (b"\x00" * 64, "malformed JSON"),
        (b'{"a": "\xe9"}', "not UTF-8"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"a": ' + b"1" * 10_000 + b"}", "too long"),
    ],
    ids=lambda value: repr(value)[:12],
)
def test_a_file_that_is_no_json_object(folder: Path, name: str, content: bytes, reason: str) -> None:
    (folder / name).write_bytes(content)
    message = refusal(folder)
    assert f"{folder / name} can't be loaded: " in message
    assert reason in message


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors", "tokenizer_config.json"]
)
def test_a_folder_in_place_of_a_file(folder: Path, name: str) -> None:
    (folder / name).unlink()
    (folder / name).mkdir()
    assert f"{folder / name} can't be loaded: Is a directory" in refusal(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"eos_token_id": "2"},
        {"eos_token_id": [[2]]},
        {"eos_token_id": 2.5},
        {"eos_token_id": True},
        {"do_sample": "yes"},
        {"do_sample": True, "temperature": "hot"},
        {"do_sample": True, "temperature": -1},
        {"do_sample": True, "top_p": 2.0},
        {"do_sample": True, "top_k": 1.5},
        {"num_beams": 0},
        {"num_beams": "4"},
        {"num_beam_groups": 0},
        {"num_beam_groups": "a"},
        {"num_beam_groups": 2**40},
        {"max_new_tokens": -1},
        {"max_new_tokens": "64"},
        {"min_new_tokens": []},
        {"max_length": "512"},
        {"stop_strings": 5},
        {"repetition_penalty": 0},
        {"repetition_penalty": math.nan},
        {"no_repeat_ngram_size": -1},
        {"length_penalty": 1e9},
        {"early_stopping": "soon"},
        {"suppress_tokens": [1, "a"]},
        {"suppress_tokens": [-1]},
        {"bad_words_ids": [5]},
    ],
    ids=str,
)
def test_a_generation_default_that_is_refused(folder: Path, changes: dict[str, Any]) -> None:
    edit(folder / "generation_config.json", **changes)
    *_, key = changes
    message = refusal(folder)
    assert message.startswith(f"{folder}/generation_config.json: {key} ")
    if key == "eos_token_id":  # always counts
        return
    assert message.endswith("leave the model's defaults out: --generation-config none")
    assert load_all(folder, use_generation_config=False).defaults.generation.values == {}


@pytest.mark.parametrize("changes", [{"cache_implementation": "zz"}, {"watermarking_config": 5}, {"pad_token_id": "x"}])
def test_what_is_not_taken_over_may_be_anything(folder: Path, changes: dict[str, Any]) -> None:
    """Loading the weights, the library would read it again, and refuse it."""
    edit(folder / "generation_config.json", **changes)
    assert load_all(folder).defaults.generation.values == {}


def test_end_tokens_that_no_model_can_write_are_left_out_and_told(folder: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=[2, -1, 10**6])
    defaults = model_defaults(str(folder))
    assert defaults.eos_token_ids == {2}
    assert defaults.remarks == ("the model's eos_token_id names -1, 1000000, outside its vocabulary of 272: left out",)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("tokenizer_config.json", {"bos_token": 5}),
        ("tokenizer_config.json", {"eos_token": [1]}),
        ("tokenizer_config.json", {"pad_token": {"content": None}}),
        ("tokenizer_config.json", {"tokenizer_class": 5}),
        ("tokenizer_config.json", {"added_tokens_decoder": 5}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"0": None}}),
        ("tokenizer_config.json", {"padding_side": "up"}),
        ("tokenizer.json", {"model": None}),
        ("tokenizer.json", {"model": {"type": "BPE"}}),
        ("tokenizer.json", {"added_tokens": None}),
        ("tokenizer.json", {"added_tokens": [1]}),
        ("tokenizer.json", {"pre_tokenizer": {"type": "zz"}}),
        ("tokenizer.json", {"decoder": 5}),
        ("tokenizer.json", {"version": "9"}),
    ],
    ids=str,
)
def test_a_tokenizer_that_cannot_be_loaded(folder: Path, name: str, changes: dict[str, Any]) -> None:
    edit(folder / name, **changes)
    assert f"{folder / name}" in refusal(folder)


def test_a_tokenizer_that_panics_when_it_is_used(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Rust's panic is no `Exception`, and writes its trace to stderr by itself."""
    missing = [{"SpecialToken": {"id": "<none>", "type_id": 0}}]
    edit(
        folder / "tokenizer.json",
        post_processor={"type": "TemplateProcessing", "single": missing, "pair": [], "special_tokens": {}},
    )
    assert f"{folder}/tokenizer.json, is broken" in refusal(folder)
    assert capfd.readouterr().err == ""


def test_a_config_is_named_before_the_tokenizer_that_reads_it_too(folder: Path) -> None:
    from pagedbatch.model.tokenizer import load_tokenizer

    edit(folder / "config.json", rms_norm_eps=None)
    with pytest.raises(UsageError, match=r"config\.json: rms_norm_eps must be"):
        load_tokenizer(str(folder))


def test_defaults_that_do_not_go_together_name_their_file(folder: Path) -> None:
    edit(folder / "generation_config.json", min_new_tokens=9, max_new_tokens=3)
    (folder / "in.jsonl").write_text('{"prompt": "a"}\n')
    exit_code, errors = command("run", folder / "in.jsonl", "-m", folder, "-o", folder / "out.jsonl")
    assert exit_code == 2
    assert f"{folder}/generation_config.json sets max_tokens, min_tokens" in errors
    assert "--generation-config none" in errors


def test_a_default_that_bars_what_is_no_token_names_its_file(folder: Path) -> None:
    edit(folder / "generation_config.json", bad_words_ids=[[10**9]])
    (folder / "in.jsonl").write_text('{"prompt": "a"}\n')
    exit_code, errors = command("run", folder / "in.jsonl", "-m", folder, "-o", folder / "out.jsonl")
    assert exit_code == 2
    assert errors.startswith("error: bad_words: 1000000000 is no token id of this model")
    assert errors.endswith(
        f"; {folder}/generation_config.json sets it: mend it, or leave the model's defaults out: "
        "--generation-config none\n"
    )


@pytest.mark.parametrize("subcommand", ["run", "plan", "doctor"])
def test_a_broken_model_ends_every_command_with_one_line(folder: Path, subcommand: str) -> None:
    edit(folder / "config.json", rms_norm_eps=None)
    (folder / "in.jsonl").write_text('{"prompt": "a"}\n')
    arguments = {
        "run": [folder / "in.jsonl", "-o", folder / "out.jsonl"],
        "plan": [folder / "in.jsonl"],
        "doctor": [],
    }[subcommand]
    exit_code, errors = command(subcommand, *arguments, "-m", folder)
    assert exit_code == 2
    assert errors == f"error: {folder}/config.json: rms_norm_eps must be a finite number from 0 to 1, got null\n"


def test_a_generation_config_beside_a_shard(folder: Path) -> None:
    """The checks let pass what is right."""
    shard(folder)
    edit(folder / "generation_config.json", do_sample=True, temperature=0.5)
    loaded = load_all(folder)
    assert loaded.defaults.generation.values == {"temperature": 0.5}
    assert loaded.dtype == torch.float32
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"


@pytest.mark.parametrize(
    "changes", [{"return_dict": False}, {"_attn_implementation": "flash_attention_2"}, {"attn_implementation": "zz"}]
)
def test_how_the_library_would_run_a_model_does_not_matter(folder: Path, changes: dict[str, Any]) -> None:
    edit(folder / "config.json", **changes)
    loaded = load_all(folder)
    engine = Engine(EngineConfig(num_blocks=8), ModelRunner.create(loaded, forward="hf", num_blocks=8))
    engine.add(Request(0, [1, 50, 60], GenerationParams(max_tokens=2)))
    while engine.has_unfinished:
        engine.step()


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors"])
def test_a_named_pipe_is_not_waited_for(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    assert f"{folder / name} can't be loaded: it is a named pipe" in refusal(folder)


def test_a_window_of_nothing(folder: Path) -> None:
    edit(folder / "config.json", model_type="mistral", sliding_window=0)
    assert "config.json: sliding_window must be at least 1 where layers have one, got 0" in refusal(folder)

"""What lies in place of a model's weights: one line that says what is there and what to do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_folders import LFS_POINTER, load_all, refusal, shard

from pagedbatch.model.weight_files import read_headers, weight_files


@pytest.fixture
def folder(rand_model_path: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(rand_model_path, tmp_path / "model"))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is empty"),
        (b"abc", "it is 3 bytes long"),
        (LFS_POINTER, "it is a pointer of Git LFS"),
        (b"\x00" * 500, "it is no safetensors file: its header is no JSON object"),
        (b"\xff" * 500, "it is no safetensors file"),
        (b"\x08" + b"\x00" * 7 + b"[      ]", "it is no safetensors file: its header"),
        (5000, "it ends after 5,000 of 437,"),
        (100, "it ends within its header, after 100 bytes"),
    ],
    ids=lambda value: repr(value)[:16],
)
def test_a_file_that_is_no_weights(folder: Path, content: bytes | int, reason: str) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:content] if isinstance(content, int) else content)
    assert refusal(folder).startswith(f"{weights} can't be loaded: {reason}")


def test_bytes_that_belong_to_no_tensor(folder: Path) -> None:
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"more")
    assert "they overlap, or leave gaps" in refusal(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "F33"},
        {"dtype": "BF16"},
        {"dtype": None},
        {"shape": [-64]},
        {"shape": [10**30]},
        {"shape": "64"},
        {"data_offsets": [0]},
        {"data_offsets": [0, 256]},
        {"data_offsets": [256, 0]},
        {"data_offsets": None},
    ],
    ids=str,
)
def test_a_header_that_cannot_be(folder: Path, changes: dict[str, Any]) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["model.norm.weight"].update(changes)
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + content[8 + length :])
    assert f"{path} can't be loaded: its header" in refusal(folder)


def test_headers_name_every_tensor(folder: Path) -> None:
    tensors = read_headers(weight_files(folder))
    assert len(tensors) == 21
    assert tensors["model.norm.weight"].shape == (64,)
    assert tensors["model.norm.weight"].dtype == torch.float32


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"weight_map": None}, "weight_map must be an object of tensor names and files, got null"),
        ({"weight_map": {}}, "weight_map must be an object of tensor names and files, got {}"),
        ({"weight_map": {"a": 5}}, "weight_map.a must be the name of a file beside it, got 5"),
        ({"weight_map": {"a": "../model.safetensors"}}, "weight_map.a must be the name of a file beside it"),
        ({"metadata": None}, "metadata must be an object, got null"),
    ],
    ids=str,
)
def test_an_index_that_is_broken(folder: Path, changes: dict[str, Any], reason: str) -> None:
    shard(folder, **changes)
    assert refusal(folder).startswith(f"{folder}/model.safetensors.index.json: {reason}")


def test_a_shard_that_is_missing(folder: Path) -> None:
    (folder / shard(folder)).unlink()
    message = refusal(folder)
    assert "model.safetensors.index.json can't be loaded: it names 1 files" in message
    assert "model-00001-of-00001.safetensors is not there: finish the download" in message


def test_a_shard_that_is_none(folder: Path) -> None:
    name = shard(folder)
    (folder / name).write_bytes(LFS_POINTER)
    assert f"{folder / name} can't be loaded: it is a pointer of Git LFS" in refusal(folder)


def _only_pickle(folder: Path) -> None:
    torch.save({}, folder / "pytorch_model.bin")


def _only_adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')


def _only_shards(folder: Path) -> None:
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"")


def _gguf(folder: Path) -> None:
    (folder / "q8.gguf").write_bytes(b"GGUF")


@pytest.mark.parametrize(
    ("leave", "reason"),
    [
        (_only_pickle, "pytorch_model.bin is a pickle, which can run code when it is read: convert it"),
        (_only_adapter, "it holds an adapter and no weights: merge it into its base model (of org/base)"),
        (_only_shards, "neither model.safetensors nor model.safetensors.index.json, which says what lies where"),
        (_gguf, "give the GGUF file itself: "),
        (lambda _: None, "neither model.safetensors nor model.safetensors.index.json is there: finish the download"),
    ],
)
def test_other_things_in_place_of_weights(folder: Path, leave: Callable[[Path], None], reason: str) -> None:
    (folder / "model.safetensors").unlink()
    leave(folder)
    assert reason in refusal(folder)


def test_a_model_in_a_folder_below(folder: Path) -> None:
    inner = Path(shutil.copytree(folder, folder / "sub"))
    for path in folder.iterdir():
        if path.is_file():
            path.unlink()
    assert f"the model lies in a folder of it: give {inner}" in refusal(folder)
    load_all(inner)


def test_an_adapter_alone(tmp_path: Path) -> None:
    _only_adapter(tmp_path)
    assert "it holds an adapter and no model: merge it into its base model (of org/base)" in refusal(tmp_path)


def test_an_empty_folder(tmp_path: Path) -> None:
    assert "the folder is empty" in refusal(tmp_path)


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for content, reason in ((b"", "it is empty"), (LFS_POINTER, "git lfs pull"), (b"junk" * 9, "it is no GGUF file")):
        path.write_bytes(content)
        assert reason in refusal(path)


def test_a_file_in_place_of_a_folder(folder: Path) -> None:
    assert "is a file: give the folder that it lies in" in refusal(folder / "model.safetensors")


def test_a_folder_without_tokenizer(folder: Path) -> None:
    for path in folder.glob("*token*"):
        path.unlink()
    assert "it has no tokenizer files (tokenizer.json, tokenizer.model or vocab.json)" in refusal(folder)


def test_a_tokenizer_whose_package_is_missing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"\x0a\x0bnothing")
    monkeypatch.setattr("pagedbatch.model.tokenizer.is_installed", lambda _: False)
    assert "its tokenizer.model needs a package: pip install sentencepiece protobuf" in refusal(folder)


def test_an_index_with_a_name_that_no_file_can_have(folder: Path) -> None:
    shard(folder, weight_map={"lm_head.weight": "a" * 5000})
    assert "aaa is not there: finish the download" in refusal(folder)


@pytest.mark.parametrize("metadata", [[1], {"format": 5}, "pt"])
def test_metadata_that_the_format_does_not_have(folder: Path, metadata: Any) -> None:
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.dumps(json.loads(content[8:end]) | {"__metadata__": metadata}).encode()
    weights.write_bytes(len(header).to_bytes(8, "little") + header + content[end:])
    assert f"{weights} can't be loaded: its header's __metadata__ must be an object of texts" in refusal(folder)

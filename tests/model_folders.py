"""Model folders with something wrong, for tests: how to break one, and what a run would say of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagedbatch.errors import UsageError
from pagedbatch.model.loader import LoadedModel, load_model
from pagedbatch.model.model_defaults import model_defaults
from pagedbatch.model.tokenizer import load_tokenizer

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 4976698672\n"


def edit(path: Path, **changes: Any) -> None:
    """Changes keys of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Changes the tensors of a folder's `model.safetensors`."""
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def shard(folder: Path, **changes: Any) -> str:
    """Turns `model.safetensors` into a shard beside an index; its name. `changes` are those of the index."""
    name = "model-00001-of-00001.safetensors"
    names = list(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").rename(folder / name)
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, name), **changes}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return name


def load_all(path: Path, **options: Any) -> LoadedModel:
    """All that a run loads of a model, in its order. `options` are those of `model_defaults`."""
    defaults = model_defaults(str(path), **options)
    load_tokenizer(str(path))
    adapter = {name: value for name, value in options.items() if name == "ignore_adapter"}
    return load_model(str(path), dtype="float32", device="cpu", defaults=defaults, **adapter)


def refusal(path: Path, **options: Any) -> str:
    """The one line with which a model is refused."""
    with pytest.raises(UsageError) as caught:
        load_all(path, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def command(*arguments: object) -> tuple[int, str]:
    """Exit code and stderr of the command in a process of its own."""
    main = "from pagedbatch.cli.app import main; main()"
    process = subprocess.run(
        [sys.executable, "-c", main, *map(str, arguments)],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TERM": "dumb"},
        capture_output=True,
        check=False,
    )
    return process.returncode, process.stderr.decode()

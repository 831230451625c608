"""Weights that lie in a mapped file: each can go by itself, and says what it said."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pagedbatch_kernels.cpu.build import can_load
from safetensors.torch import load_file, save_file
from torch import nn

from pagedbatch.model import llama_forward
from pagedbatch.model.loader import load_model
from pagedbatch.model.mapped_weights import map_separately
from pagedbatch.model.runner import ModelRunner

MAPS = Path("/proc/self/maps")

pytestmark = pytest.mark.skipif(not MAPS.exists(), reason="this system doesn't tell what is mapped")

PAGE = 4096


def mapped_bytes(path: Path) -> int:
    """How much of a file is mapped into this process, whole pages."""
    ranges = [line.split()[0].split("-") for line in MAPS.read_text().splitlines() if line.endswith(str(path))]
    return sum(int(stop, 16) - int(start, 16) for start, stop in ranges)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Three tensors, of which none begins at a page."""
    path = tmp_path / "weights of a model.safetensors"
    names = "abc"
    save_file({name: torch.randn(7, 3000, dtype=torch.bfloat16) + i for i, name in enumerate(names)}, path)
    return path


def parameters_of(path: Path) -> list[nn.Parameter]:
    return [nn.Parameter(tensor, requires_grad=False) for _, tensor in sorted(load_file(path).items())]


def test_each_goes_by_itself(checkpoint: Path) -> None:
    parameters = parameters_of(checkpoint)
    expected = [parameter.clone() for parameter in parameters]
    map_separately(parameters)
    assert all(torch.equal(parameter, same) for parameter, same in zip(parameters, expected, strict=True))
    while parameters:
        assert mapped_bytes(checkpoint) <= sum(parameter.nbytes + 2 * PAGE for parameter in parameters)
        parameters.pop()
    assert mapped_bytes(checkpoint) == 0


def test_writing_to_one_leaves_the_file_alone(checkpoint: Path) -> None:
    before = checkpoint.read_bytes()
    parameters = parameters_of(checkpoint)
    map_separately(parameters)
    parameters[0].fill_(1.0)
    assert bool((parameters[0] == 1.0).all())
    assert checkpoint.read_bytes() == before


def test_a_file_that_was_replaced_is_not_read_again(checkpoint: Path) -> None:
    parameters = parameters_of(checkpoint)
    expected = [parameter.clone() for parameter in parameters]
    other = checkpoint.with_name("other")
    other.write_bytes(bytes(checkpoint.stat().st_size))
    other.replace(checkpoint)
    map_separately(parameters)
    assert all(torch.equal(parameter, same) for parameter, same in zip(parameters, expected, strict=True))


def test_memory_without_a_file_stays_as_it_is() -> None:
    parameters = [nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(4, 3).t()), nn.Parameter(torch.ones(0, 4))]
    places = [parameter.data_ptr() for parameter in parameters]
    map_separately(parameters)
    assert [parameter.data_ptr() for parameter in parameters] == places


@pytest.mark.skipif(not can_load(), reason="there is no C++ compiler here")
def test_a_packed_layer_takes_its_part_of_the_checkpoint_along(
    rand_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shutil.copytree(rand_model_path, tmp_path / "model")  # other tests keep the shared one mapped
    checkpoint = model / "model.safetensors"
    still_mapped: list[int] = []
    pack = llama_forward.Layer.of

    def watch(*args: Any, **options: Any) -> llama_forward.Layer:
        layer = pack(*args, **options)
        still_mapped.append(mapped_bytes(checkpoint))
        return layer

    monkeypatch.setattr(llama_forward.Layer, "of", watch)
    loaded = load_model(str(model), dtype="float32", device="cpu")
    runner = ModelRunner.create(loaded, attention="cpu", keep_model=False, num_blocks=4)
    assert runner.forward_name == "fused"
    assert still_mapped == sorted(set(still_mapped), reverse=True)  # ever less
    assert mapped_bytes(checkpoint) == 0

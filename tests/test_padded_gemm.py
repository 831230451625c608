"""GEMMs of 16-bit numbers padded to whole tiles: the same results, and no vector read past its end."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from reads_past import ReadsPast
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from pagedbatch.model.padded_gemm import PaddedGemm, needs_padding, pad_to_tiles

HALVES = [torch.bfloat16, torch.float16]
SIZES = [1, 7, 17, 33, 43, 172]
Gemm = Callable[[Tensor, Tensor], Tensor]

#: Each takes inputs [num_tokens, size] and a weight [width, size].
GEMMS: dict[str, Gemm] = {
    "linear": functional.linear,
    "linear with a bias": lambda inputs, weight: functional.linear(inputs, weight, bias=weight[:, 0].contiguous()),
    "linear of a batch": lambda inputs, weight: functional.linear(inputs.unsqueeze(0), weight)[0],
    "matmul": lambda inputs, weight: torch.matmul(inputs, weight.T),
    "matmul with a vector": lambda inputs, weight: torch.matmul(inputs, weight[0]).unsqueeze(1).expand(-1, len(weight)),
    "@": lambda inputs, weight: inputs @ weight.T,
    ".matmul": lambda inputs, weight: inputs.matmul(weight.T),
    "mm": lambda inputs, weight: torch.mm(inputs, weight.T, out=inputs.new_empty(len(inputs), len(weight))),
    "bmm": lambda inputs, weight: torch.bmm(inputs.unsqueeze(0), weight.T.unsqueeze(0))[0],
    "addmm": lambda inputs, weight: torch.addmm(weight[:, 0], inputs, weight.T),
    "baddbmm": lambda inputs, weight: torch.baddbmm(
        inputs.new_ones(1, 1, 1), inputs.unsqueeze(0), weight.T.unsqueeze(0), beta=0.5
    )[0],
    "experts": lambda inputs, weight: functional.grouped_mm(
        inputs, weight.T.contiguous().unsqueeze(0), offs=torch.tensor([len(inputs)], dtype=torch.int32)
    ),
}


def factors(size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    inputs = torch.randn(5, size, generator=generator).to(dtype)
    return inputs, torch.randn(11, size, generator=generator).to(dtype)


def compute(name: str, inputs: Tensor, weight: Tensor) -> Tensor:
    try:
        return GEMMS[name](inputs, weight)
    except (RuntimeError, NotImplementedError) as error:
        if name == "experts":
            pytest.skip(f"torch has no grouped GEMM of these here: {error}")
        raise


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("size", [*SIZES, 64])
@pytest.mark.parametrize("name", GEMMS)
def test_results_are_the_same(name: str, size: int, dtype: torch.dtype) -> None:
    inputs, weight = factors(size, dtype)
    with PaddedGemm():
        found = compute(name, inputs, weight)
    expected = GEMMS[name](inputs.float(), weight.float()) if name != "experts" else inputs.float() @ weight.float().T
    torch.testing.assert_close(found, expected.to(dtype), rtol=2**-7, atol=2**-4)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", GEMMS)
def test_no_row_is_read_past_its_end(name: str, dtype: torch.dtype) -> None:
    inputs, weight = factors(172, dtype)
    good = compute(name, inputs, weight)
    for bad, value in ((0, torch.nan), (2, torch.inf), (4, -torch.inf)):
        mixed = inputs.clone()
        mixed[bad] = value
        others = [i for i in range(len(inputs)) if i != bad]
        with ReadsPast(dtype) as device:
            unpadded = compute(name, mixed, weight)
            assert device.num_cut == 1
            if bad > 0:
                assert not unpadded[bad - 1].isfinite().any()
            with PaddedGemm():
                found = compute(name, mixed, weight)
            assert device.num_cut == 1
            with PaddedGemm():
                whole = compute(name, inputs, weight)
        assert torch.equal(found[others], whole[others])
        assert not found[bad].isfinite().all()
    torch.testing.assert_close(whole, good, rtol=2**-7, atol=2**-4)


def test_float32_is_left_alone() -> None:
    inputs, weight = torch.randn(5, 43), torch.randn(11, 43)
    with ReadsPast(torch.float32) as device, PaddedGemm():
        assert torch.equal(functional.linear(inputs, weight), inputs @ weight.T)
    assert device.num_cut == device.num_gemms == 2


def test_padding() -> None:
    values = torch.arange(6.0).view(2, 3)
    for dim, size in ((-1, (2, 32)), (-2, (32, 3))):
        padded = pad_to_tiles(values, dim)
        assert padded.shape == size
        assert torch.equal(padded[:2, :3], values)
        assert padded.count_nonzero() == 5
    whole = torch.randn(3, 64)
    assert pad_to_tiles(whole) is whole


@pytest.mark.parametrize(
    ("module", "answer"),
    [
        (nn.Linear(64, 43), False),
        (nn.Linear(43, 64), True),
        (nn.Embedding(43, 64), False),
        (nn.Embedding(43, 24), True),  # may be a head's weights too
        (Conv1D(64, 96), False),
        (Conv1D(64, 43), True),
        (nn.LayerNorm(43), False),
        (nn.Sequential(nn.Linear(64, 64), nn.Linear(8, 64)), True),  # an adapter's way up
        (nn.ParameterList([torch.zeros(3, 64, 64)]), False),
        (nn.ParameterList([torch.zeros(3, 64, 43)]), True),  # experts
        (nn.ParameterList([torch.zeros(3, 43, 64)]), True),
    ],
)
def test_which_models_need_it(module: nn.Module, answer: bool) -> None:
    assert not needs_padding(module)
    for dtype in HALVES:
        assert needs_padding(module.to(dtype)) == answer
    assert not needs_padding(module.to("meta"))

"""Products of 16-bit numbers with rows padded to whole tiles: the same results, and no row read past its end."""

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
Product = Callable[[Tensor, Tensor], Tensor]

#: Each takes rows [num_rows, size] and a weight [width, size].
PRODUCTS: dict[str, Product] = {
    "linear": functional.linear,
    "linear with a bias": lambda rows, weight: functional.linear(rows, weight, bias=weight[:, 0].contiguous()),
    "linear of a batch": lambda rows, weight: functional.linear(rows.unsqueeze(0), weight)[0],
    "matmul": lambda rows, weight: torch.matmul(rows, weight.T),
    "matmul with a vector": lambda rows, weight: torch.matmul(rows, weight[0]).unsqueeze(1).expand(-1, len(weight)),
    "@": lambda rows, weight: rows @ weight.T,
    ".matmul": lambda rows, weight: rows.matmul(weight.T),
    "mm": lambda rows, weight: torch.mm(rows, weight.T, out=rows.new_empty(len(rows), len(weight))),
    "bmm": lambda rows, weight: torch.bmm(rows.unsqueeze(0), weight.T.unsqueeze(0))[0],
    "addmm": lambda rows, weight: torch.addmm(weight[:, 0], rows, weight.T),
    "baddbmm": lambda rows, weight: torch.baddbmm(
        rows.new_ones(1, 1, 1), rows.unsqueeze(0), weight.T.unsqueeze(0), beta=0.5
    )[0],
    "experts": lambda rows, weight: functional.grouped_mm(
        rows, weight.T.contiguous().unsqueeze(0), offs=torch.tensor([len(rows)], dtype=torch.int32)
    ),
}


def factors(size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    rows = torch.randn(5, size, generator=generator).to(dtype)
    return rows, torch.randn(11, size, generator=generator).to(dtype)


def compute(name: str, rows: Tensor, weight: Tensor) -> Tensor:
    try:
        return PRODUCTS[name](rows, weight)
    except (RuntimeError, NotImplementedError) as error:
        if name == "experts":
            pytest.skip(f"torch has no grouped product of these here: {error}")
        raise


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("size", [*SIZES, 64])
@pytest.mark.parametrize("name", PRODUCTS)
def test_results_are_the_same(name: str, size: int, dtype: torch.dtype) -> None:
    rows, weight = factors(size, dtype)
    with PaddedGemm():
        found = compute(name, rows, weight)
    expected = PRODUCTS[name](rows.float(), weight.float()) if name != "experts" else rows.float() @ weight.float().T
    torch.testing.assert_close(found, expected.to(dtype), rtol=2**-7, atol=2**-4)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_no_row_is_read_past_its_end(name: str, dtype: torch.dtype) -> None:
    rows, weight = factors(172, dtype)
    good = compute(name, rows, weight)
    for bad, value in ((0, torch.nan), (2, torch.inf), (4, -torch.inf)):
        mixed = rows.clone()
        mixed[bad] = value
        others = [row for row in range(len(rows)) if row != bad]
        with ReadsPast(dtype) as device:
            unpadded = compute(name, mixed, weight)
            assert device.num_cut == 1
            if bad > 0:
                assert not unpadded[bad - 1].isfinite().any()
            with PaddedGemm():
                found = compute(name, mixed, weight)
            assert device.num_cut == 1
            with PaddedGemm():
                whole = compute(name, rows, weight)
        assert torch.equal(found[others], whole[others])
        assert not found[bad].isfinite().all()
    torch.testing.assert_close(whole, good, rtol=2**-7, atol=2**-4)


def test_float32_is_left_alone() -> None:
    rows, weight = torch.randn(5, 43), torch.randn(11, 43)
    with ReadsPast(torch.float32) as device, PaddedGemm():
        assert torch.equal(functional.linear(rows, weight), rows @ weight.T)
    assert device.num_cut == device.num_products == 2


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
        (nn.Embedding(43, 24), True),  # its rows may be a head's weights too
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

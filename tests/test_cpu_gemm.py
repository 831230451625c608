"""The CPU's products with matrices laid out once, against torch's in float64, and that no row depends on another."""

from __future__ import annotations

import pytest
import torch
from pagedbatch_kernels.cpu.build import can_load
from pagedbatch_kernels.cpu.gemm import PackedGemm, PackedWeight
from torch import Tensor
from torch.nn.functional import silu

pytestmark = pytest.mark.skipif(not can_load(), reason="there is no C++ compiler here")

#: Rounding once to 8 bits, or sums of up to 1,500 float32 products.
TOLERANCE = {torch.bfloat16: {"rtol": 2**-8, "atol": 1e-4}, torch.float32: {"rtol": 1e-5, "atol": 1e-4}}
DTYPES = list(TOLERANCE)


@pytest.fixture(scope="module")
def gemm() -> PackedGemm:
    return PackedGemm(lambda line: None)


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 5, 6, 7, 64, 97, 200])
@pytest.mark.parametrize("size", [2, 30, 1026, 1500])
def test_products(gemm: PackedGemm, dtype: torch.dtype, num_rows: int, size: int) -> None:
    torch.manual_seed(size)
    rows = random(num_rows, size, dtype=dtype)
    matrices = [random(width, size, dtype=dtype) for width in (1, 70, 128)]
    biases = [None, random(70, dtype=dtype), None]
    residual = random(num_rows, 199, dtype=dtype)
    expected = rows.double() @ torch.cat(matrices).double().T
    found = gemm.matmul(gemm.pack(matrices, [None] * 3), rows)
    torch.testing.assert_close(found.double(), expected, **TOLERANCE[dtype])
    assert found.dtype == dtype
    expected[:, 1:71] += biases[1].double()
    found = gemm.matmul(gemm.pack(matrices, biases), rows, residual)
    torch.testing.assert_close(found.double(), expected + residual.double(), **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 31, 32, 100])
def test_gated_products(gemm: PackedGemm, dtype: torch.dtype, width: int) -> None:
    rows = random(9, 34, dtype=dtype) * 8  # some gates far below -88, where e^-x has no float
    gate, up = random(2, width, 34, dtype=dtype)
    biases = [random(width, dtype=dtype) for _ in range(2)]
    expected = silu(rows.double() @ gate.double().T + biases[0]) * (rows.double() @ up.double().T + biases[1])
    found = gemm.matmul(gemm.pack_swiglu(gate, up, biases), rows)
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE[dtype]["rtol"], atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_in_any_batch_and_for_any_number_of_threads(gemm: PackedGemm, dtype: torch.dtype) -> None:
    rows, weight = random(211, 1100, dtype=dtype), random(150, 1100, dtype=dtype)
    threads = torch.get_num_threads()
    for panels in (gemm.pack([weight], [None]), gemm.pack_swiglu(weight[:75], weight[75:], [None, None])):
        together = gemm.matmul(panels, rows)
        assert torch.equal(torch.cat([gemm.matmul(panels, row.unsqueeze(0)) for row in rows]), together)
        try:
            for other in (1, 3, 8):
                torch.set_num_threads(other)
                assert torch.equal(gemm.matmul(panels, rows), together)
        finally:
            torch.set_num_threads(threads)


def test_nothing_is_computed_for_no_rows(gemm: PackedGemm) -> None:
    panels = gemm.pack([torch.randn(4, 6)], [None])
    assert gemm.matmul(panels, torch.empty(0, 6)).shape == (0, 4)


def test_not_a_number_stays_in_its_row(gemm: PackedGemm) -> None:
    rows = torch.randn(3, 8)
    rows[1, 2] = torch.nan
    for dtype in DTYPES:
        weight = random(5, 8, dtype=dtype)
        for panels in (gemm.pack([weight], [None]), gemm.pack_swiglu(weight, weight, [None, None])):
            found = gemm.matmul(panels, rows.to(dtype))
            assert found.isnan().any(dim=1).tolist() == [False, True, False]


def refused(gemm: PackedGemm, panels: PackedWeight, rows: Tensor, residual: Tensor | None = None) -> None:
    with pytest.raises(ValueError, match="expected contiguous"):
        gemm.matmul(panels, rows, residual)


def test_what_does_not_fit_is_refused(gemm: PackedGemm) -> None:
    weight = torch.randn(4, 6)
    panels = gemm.pack([weight], [None])
    refused(gemm, panels, torch.randn(2, 5))
    refused(gemm, panels, torch.randn(6, 2).T)
    refused(gemm, panels, torch.randn(2, 6).bfloat16())
    refused(gemm, panels, torch.randn(2, 6), torch.randn(2, 5))
    with pytest.raises(ValueError, match="expected contiguous"):
        gemm.pack([weight, torch.randn(4, 8)], [None, None])
    with pytest.raises(ValueError, match="expected contiguous"):
        gemm.pack([weight], [torch.randn(5)])
    with pytest.raises(ValueError, match="not whole words"):
        gemm.pack([torch.randn(4, 5).bfloat16()], [None])
    with pytest.raises(ValueError, match="gates for"):
        gemm.pack_swiglu(weight, torch.randn(5, 6), [None, None])

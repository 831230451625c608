"""The CPU's gemm with packed weights, against torch's in float64, and that no token depends on another."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
import torch
from pagedbatch_kernels.cpu.build import can_load
from pagedbatch_kernels.cpu.gemm import Activation, PackedGemm, PackedWeight
from torch import Tensor
from torch.nn.functional import gelu, relu, silu

pytestmark = pytest.mark.skipif(not can_load(), reason="there is no C++ compiler here")

#: Rounding once to 8 bits, or sums of up to 1,500 float32 products.
TOLERANCE = {torch.bfloat16: {"rtol": 2**-8, "atol": 1e-4}, torch.float32: {"rtol": 1e-5, "atol": 1e-4}}
DTYPES = list(TOLERANCE)
FUNCTIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "relu": relu,
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
}


@pytest.fixture(scope="module")
def gemm() -> PackedGemm:
    return PackedGemm()


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 5, 6, 7, 64, 97, 200])
@pytest.mark.parametrize("k", [2, 30, 1026, 1500])
def test_matmul(gemm: PackedGemm, dtype: torch.dtype, m: int, k: int) -> None:
    torch.manual_seed(k)
    x = random(m, k, dtype=dtype)
    matrices = [random(n, k, dtype=dtype) for n in (1, 70, 128)]
    biases = [None, random(70, dtype=dtype), None]
    residual = random(m, 199, dtype=dtype)
    expected = x.double() @ torch.cat(matrices).double().T
    found = gemm.matmul(gemm.pack(matrices, [None] * 3), x)
    torch.testing.assert_close(found.double(), expected, **TOLERANCE[dtype])
    assert found.dtype == dtype
    expected[:, 1:71] += biases[1].double()
    found = gemm.matmul(gemm.pack(matrices, biases), x, residual)
    torch.testing.assert_close(found.double(), expected + residual.double(), **TOLERANCE[dtype])


@pytest.mark.parametrize("activation", FUNCTIONS)
def test_activations_are_precise(gemm: PackedGemm, activation: Activation) -> None:
    """The product is the input itself, so only the activation is off; from where it is 0 to where e^x has no float."""
    x = torch.cat(
        [torch.linspace(-12, 12, 4001), torch.tensor([0.0, -0.0, 1e-30, -90.0, 90.0, -1e4, 1e4, -1e30, 1e30])]
    )
    found = gemm.matmul(gemm.pack([torch.ones(1, 1)], [None]), x.unsqueeze(1), activation=activation)
    torch.testing.assert_close(found.squeeze(1).double(), FUNCTIONS[activation](x.double()), rtol=1e-6, atol=5e-7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", FUNCTIONS)
def test_an_activation_comes_between_bias_and_residual(
    gemm: PackedGemm, dtype: torch.dtype, activation: Activation
) -> None:
    x, weight, bias = (random(*shape, dtype=dtype) for shape in ((9, 34), (70, 34), (70,)))
    residual = random(9, 70, dtype=dtype)
    expected = FUNCTIONS[activation](x.double() @ weight.double().T + bias) + residual
    found = gemm.matmul(gemm.pack([weight], [bias]), x, residual, activation)
    torch.testing.assert_close(found.double(), expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", FUNCTIONS)
@pytest.mark.parametrize("n", [1, 31, 32, 100])
def test_a_gated_pair(gemm: PackedGemm, dtype: torch.dtype, n: int, activation: Activation) -> None:
    x = random(9, 34, dtype=dtype) * 8  # some gates far below -88, where e^-x has no float
    gate, up = random(2, n, 34, dtype=dtype)
    biases = [random(n, dtype=dtype) for _ in range(2)]
    gated = FUNCTIONS[activation](x.double() @ gate.double().T + biases[0])
    expected = gated * (x.double() @ up.double().T + biases[1])
    found = gemm.matmul(gemm.pack_gated(gate, up, biases), x, activation=activation)
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE[dtype]["rtol"], atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_is_the_same_in_any_batch_and_for_any_number_of_threads(gemm: PackedGemm, dtype: torch.dtype) -> None:
    x, weight = random(211, 1100, dtype=dtype), random(150, 1100, dtype=dtype)
    threads = torch.get_num_threads()
    for packed in (gemm.pack([weight], [None]), gemm.pack_gated(weight[:75], weight[75:], [None, None])):
        for activation in FUNCTIONS:
            multiply = partial(gemm.matmul, packed, activation=activation)
            assert torch.equal(torch.cat([multiply(row.unsqueeze(0)) for row in x]), multiply(x))
        together = gemm.matmul(packed, x)
        try:
            for other in (1, 3, 8):
                torch.set_num_threads(other)
                assert torch.equal(gemm.matmul(packed, x), together)
        finally:
            torch.set_num_threads(threads)


def test_nothing_is_computed_for_no_tokens(gemm: PackedGemm) -> None:
    packed = gemm.pack([torch.randn(4, 6)], [None])
    assert gemm.matmul(packed, torch.empty(0, 6)).shape == (0, 4)


def test_not_a_number_stays_in_its_row(gemm: PackedGemm) -> None:
    x = torch.randn(3, 8)
    x[1, 2] = torch.nan
    for dtype in DTYPES:
        weight = random(5, 8, dtype=dtype)
        packed = (gemm.pack([weight], [None]), gemm.pack_gated(weight, weight, [None, None]))
        for each, activation in product(packed, FUNCTIONS):
            found = gemm.matmul(each, x.to(dtype), activation=activation)
            assert found.isnan().any(dim=1).tolist() == [False, True, False]


def refused(gemm: PackedGemm, packed: PackedWeight, x: Tensor, residual: Tensor | None = None) -> None:
    with pytest.raises(ValueError, match="expected contiguous"):
        gemm.matmul(packed, x, residual)


def test_what_does_not_fit_is_refused(gemm: PackedGemm) -> None:
    weight = torch.randn(4, 6)
    packed = gemm.pack([weight], [None])
    refused(gemm, packed, torch.randn(2, 5))
    refused(gemm, packed, torch.randn(6, 2).T)
    refused(gemm, packed, torch.randn(2, 6).bfloat16())
    refused(gemm, packed, torch.randn(2, 6), torch.randn(2, 5))
    with pytest.raises(ValueError, match="expected contiguous"):
        gemm.pack([weight, torch.randn(4, 8)], [None, None])
    with pytest.raises(ValueError, match="expected contiguous"):
        gemm.pack([weight], [torch.randn(5)])
    with pytest.raises(ValueError, match="k = 5 is odd"):
        gemm.pack([torch.randn(4, 5).bfloat16()], [None])
    with pytest.raises(ValueError, match=r"gate is \[4, 6\], up \[5, 6\]"):
        gemm.pack_gated(weight, torch.randn(5, 6), [None, None])

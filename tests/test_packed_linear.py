"""Packed linear layers, by our library and by oneDNN, against the layers themselves."""

from __future__ import annotations

import pytest
import torch
from pagedbatch_kernels.cpu.build import can_load
from pagedbatch_kernels.cpu.gemm import PackedGemm
from reads_past import ReadsPast
from torch import Tensor, nn

from pagedbatch.model.packed_linear import Linears, OneDnnLinears, PackedLinears, choose_linears

pytestmark = pytest.mark.skipif(not can_load(), reason="there is no C++ compiler here")

TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2}}


def linears_of(name: str, dtype: torch.dtype) -> Linears:
    if name == "panels":
        return PackedLinears(PackedGemm())
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.zeros(2, 2, dtype=dtype), 2)
    except RuntimeError as error:
        pytest.skip(f"oneDNN can't do it on this CPU: {error}")
    return OneDnnLinears()


@pytest.fixture(params=["panels", "onednn"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("has_bias", [True, False])
def test_linears_stand_side_by_side(name: str, dtype: torch.dtype, has_bias: bool) -> None:
    first, second = nn.Linear(24, 10, bias=has_bias).to(dtype), nn.Linear(24, 7, bias=False).to(dtype)
    hidden, residual = torch.randn(5, 24).to(dtype), torch.randn(5, 17).to(dtype)
    with torch.inference_mode():
        expected = torch.cat([first(hidden), second(hidden)], dim=-1)
        linear = linears_of(name, dtype).linear(first, second, keep=True)
        torch.testing.assert_close(linear(hidden), expected, **TOLERANCE[dtype])
        torch.testing.assert_close(linear(hidden, residual), expected + residual, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_gated_pair(name: str, dtype: torch.dtype, has_bias: bool) -> None:
    gate, up = (nn.Linear(24, 37, bias=has_bias).to(dtype) for _ in range(2))
    hidden = torch.randn(5, 24).to(dtype)
    with torch.inference_mode():
        expected = nn.functional.silu(gate(hidden)) * up(hidden)
        swiglu = linears_of(name, dtype).gated(gate, up, "silu", keep=True)
        torch.testing.assert_close(swiglu(hidden), expected, **TOLERANCE[dtype])


def weights(layers: list[nn.Linear]) -> list[Tensor]:
    return [layer.weight for layer in layers]


def test_weights_go_unless_they_are_to_be_kept(name: str) -> None:
    layers = [nn.Linear(8, 6) for _ in range(5)]
    linears = linears_of(name, torch.float32)
    with torch.inference_mode():
        linears.linear(*layers[:2], keep=True)
        linears.linear(layers[2], keep=False)
        linears.gated(layers[3], layers[4], "silu", keep=False)
    assert [weight.numel() for weight in weights(layers)] == [48, 48, 0, 0, 0]


def test_onednn_only_where_the_cpu_multiplies_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_unit in (False, True):
        monkeypatch.setattr(PackedGemm, "has_matrix_unit", property(lambda self, answer=has_unit: answer))
        assert isinstance(choose_linears(torch.float32), PackedLinears)
        chosen = choose_linears(torch.bfloat16)
        assert isinstance(chosen, OneDnnLinears) == (has_unit and torch.ops.mkldnn._is_mkldnn_bf16_supported())


@pytest.mark.parametrize("size", [1, 7, 43, 172])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_onednn_reads_no_row_past_its_end(size: int, bad: float) -> None:
    """Whether it would is a matter of the CPU: here it does, by `ReadsPast`."""
    linears = linears_of("onednn", torch.float32)
    first, second = nn.Linear(size, 10), nn.Linear(size, 10)
    hidden, residual = torch.randn(5, size), torch.randn(5, 10)
    mixed = hidden.clone()
    mixed[2] = bad
    others = [0, 1, 3, 4]
    added_to = linears.linear(first, keep=True)
    with torch.inference_mode(), ReadsPast(torch.float32) as device:
        for linear in (
            linears.linear(first, second, keep=True),
            linears.gated(first, second, "silu", keep=True),
            lambda hidden: added_to(hidden, residual),
        ):
            found = linear(mixed)
            assert torch.equal(found[others], linear(hidden)[others])
            assert not found[2].isfinite().all()
    assert (device.num_gemms, device.num_cut) == (8, 0)

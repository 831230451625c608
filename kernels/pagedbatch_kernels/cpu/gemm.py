"""PackedGemm with matrices laid out for them once, by the library that `build` makes. Float32 or bfloat16.

An element of the result is one float32 sum, always taken in the same order, and rounded once: a row's result doesn't
depend on the other rows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from pagedbatch_kernels.cpu.build import load_library
from pagedbatch_kernels.cpu.tensors import check, is_bfloat16


class Product(ctypes.Structure):
    """The arguments of `multiply`: `pagedbatch::Product` of products.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("rows", "panels", "bias", "residual", "result", "next")),
        *((name, ctypes.c_int64) for name in ("num_rows", "size", "width", "next_words", "next_panels")),
        *((name, ctypes.c_int32) for name in ("is_gated", "is_bfloat16", "num_threads")),
    )


@dataclass(slots=True, eq=False)
class PackedWeight:
    """A matrix that rows of `size` are multiplied with, to rows of `width`. `is_gated`: two matrices of that width."""

    values: Tensor  #: of the matrix's dtype, in the library's order
    bias: Tensor | None  #: float32, likewise
    size: int
    width: int
    is_gated: bool
    place: tuple[int, int, int]  #: address, words of a row, number of panels
    next_place: tuple[int, int, int] = (0, 0, 0)  #: of the matrix that was multiplied with after this one


class PackedGemm:
    """The functions of one loaded library.

    Args:
        notice: takes one line when the library has to be built first.

    Raises:
        BuildError: there is none and it can't be built.
    """

    def __init__(self, notice: Callable[[str], None]) -> None:
        library = load_library(notice)
        self._panel_width: int = library.pagedbatch_panel_width()
        self._has_matrix_unit = library.pagedbatch_has_matrix_unit
        self._has_matrix_unit.restype = ctypes.c_bool
        self._lay_out = library.pagedbatch_lay_out
        self._lay_out.argtypes = [
            *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64),
            *(ctypes.c_int32, ctypes.c_int32),
        ]
        self._lay_out.restype = None
        self._gemm = library.pagedbatch_multiply
        self._gemm.argtypes, self._gemm.restype = [ctypes.POINTER(Product)], None
        # Matrices take turns, step after step: each learns which one to fetch at its end, and no more than its place,
        # as it would else keep that one alive.
        self._last: PackedWeight | None = None

    @property
    def has_matrix_unit(self) -> bool:
        """Whether the CPU has instructions for matrices of bfloat16, several times as fast as this library's."""
        return bool(self._has_matrix_unit())

    def pack(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> PackedWeight:
        """For products with all of `weights` [width of each, size], side by side, and their `biases` [width of each].

        Raises:
            ValueError: matrices that don't fit each other, or of an odd size in bfloat16.
        """
        *firsts, width = accumulate(map(len, weights), initial=0)
        return self._laid_out(weights, biases, firsts, width, is_gated=False)

    def pack_swiglu(self, gate: Tensor, up: Tensor, biases: Sequence[Tensor | None]) -> PackedWeight:
        """For SiLU of the product with `gate` [width, size], times the product with `up` (SwiGLU, arXiv 2002.05202).

        Raises:
            ValueError: as `pack`.
        """
        if gate.shape != up.shape:
            raise ValueError(f"{list(gate.shape)} gates for {list(up.shape)}")
        return self._laid_out((gate, up), biases, (0, self._panel_width // 2), len(gate), is_gated=True)

    def _laid_out(
        self,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        firsts: Sequence[int],
        width: int,
        *,
        is_gated: bool,
    ) -> PackedWeight:
        size, dtype = weights[0].shape[1], weights[0].dtype
        if size % (4 // dtype.itemsize):
            raise ValueError(f"rows of {size} in {dtype} are not whole words")
        a_panel = self._panel_width // 2 if is_gated else self._panel_width
        num_columns = -(-width // a_panel) * self._panel_width
        values = torch.zeros(num_columns * size, dtype=dtype)
        bias = None if all(each is None for each in biases) else torch.zeros(num_columns)
        for weight, own_bias, first in zip(weights, biases, firsts, strict=True):
            check(weight, dtype, (len(weight), size))
            self._put(weight, values, first, is_gated)
            if own_bias is not None and bias is not None:
                check(own_bias, dtype, (len(weight),))
                self._put(own_bias.float().unsqueeze(1), bias, first, is_gated)
        place = values.data_ptr(), size * dtype.itemsize // 4, num_columns // self._panel_width
        return PackedWeight(values, bias, size, width, is_gated, place)

    def _put(self, rows: Tensor, panels: Tensor, first: int, is_gated: bool) -> None:
        self._lay_out(rows.data_ptr(), *rows.shape, panels.data_ptr(), first, is_gated, is_bfloat16(rows))

    def matmul(self, panels: PackedWeight, rows: Tensor, residual: Tensor | None = None) -> Tensor:
        """[num_rows, width] for `rows` [num_rows, size]; `residual`, of the result's shape, is added.

        Raises:
            ValueError: shapes or dtypes that don't fit each other.
        """
        num_rows, dtype = len(rows), panels.values.dtype
        check(rows, dtype, (num_rows, panels.size))
        if residual is not None:
            check(residual, dtype, (num_rows, panels.width))
        if self._last is not None:
            self._last.next_place = panels.place
        self._last = panels
        next_address, next_words, next_panels = panels.next_place
        result = rows.new_empty(num_rows, panels.width)
        self._gemm(
            ctypes.byref(
                Product(
                    rows=rows.data_ptr(),
                    panels=panels.values.data_ptr(),
                    bias=None if panels.bias is None else panels.bias.data_ptr(),
                    residual=None if residual is None else residual.data_ptr(),
                    result=result.data_ptr(),
                    next=next_address,
                    num_rows=num_rows,
                    size=panels.size,
                    width=panels.width,
                    next_words=next_words,
                    next_panels=next_panels,
                    is_gated=panels.is_gated,
                    is_bfloat16=is_bfloat16(rows),
                    num_threads=torch.get_num_threads(),
                )
            )
        )
        return result

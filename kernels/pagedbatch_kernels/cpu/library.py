"""The C++ library as ctypes sees it: every struct and function that is called from Python, declared once.

A struct has the fields of the C++ struct of its name, in order; C++ exports its size, which `load_kernels` compares.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_bool, c_float, c_int32, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from pagedbatch_kernels.cpu.build import BuildError, load_library


def _fields(ctype: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, ctype) for name in names.split()]


class LayerCache(ctypes.Structure):
    _fields_ = (
        *_fields(c_void_p, "data"),
        *_fields(c_int64, "num_blocks block_stride value_offset"),
        *_fields(c_int32, "block_size num_kv_heads head_size is_packed"),
    )


class AttentionArgs(ctypes.Structure):
    _fields_ = (
        *_fields(c_void_p, "query output sinks position_bias"),
        *_fields(LayerCache, "cache"),
        *_fields(c_void_p, "block_tables seq_lens query_start_loc"),
        *_fields(c_void_p, "prefix_tables prefix_lens prefix_start_loc seq_prefix_lens"),
        *_fields(c_int64, "token_stride head_stride table_width prefix_table_width"),
        *_fields(c_int32, "num_seqs num_prefixes num_tokens num_heads window bias_reach"),
        *_fields(c_float, "scale softcap"),
        *_fields(c_int32, "is_causal is_bfloat16 num_threads"),
    )


class WriteKvArgs(ctypes.Structure):
    _fields_ = (
        *_fields(c_void_p, "key value slots"),
        *_fields(LayerCache, "cache"),
        *_fields(c_int64, "num_tokens key_stride key_head_stride value_stride value_head_stride"),
        *_fields(c_int32, "is_bfloat16 is_float16"),
    )


class RopeArgs(ctypes.Structure):
    _fields_ = (
        *_fields(c_void_p, "qkv cos sin q_norm k_norm slots"),
        *_fields(LayerCache, "cache"),
        *_fields(c_int64, "num_tokens"),
        *_fields(c_int32, "num_heads"),
        *_fields(c_float, "epsilon"),
        *_fields(c_int32, "is_bfloat16 num_threads"),
    )


class GemmArgs(ctypes.Structure):
    _fields_ = (
        *_fields(c_void_p, "input weight bias residual output next_weight"),
        *_fields(c_int64, "m k n next_k next_num_panels"),
        *_fields(c_int32, "is_gated activation is_bfloat16 num_threads"),
    )


class SampleArgs(ctypes.Structure):
    _fields_ = (
        *_fields(c_void_p, "logits temperatures top_k top_p min_p starts uniforms token_ids probs"),
        *_fields(c_int64, "batch_size vocab_size stride"),
        *_fields(c_int32, "is_bfloat16 num_threads"),
    )


class JointTopkArgs(ctypes.Structure):
    _fields_ = (
        *_fields(c_void_p, "logits logsumexp cum_logprobs scores indices"),
        *_fields(c_int64, "num_groups group_size vocab_size stride k"),
        *_fields(c_int32, "is_bfloat16 num_threads"),
    )


STRUCTS = (LayerCache, AttentionArgs, WriteKvArgs, RopeArgs, GemmArgs, SampleArgs, JointTopkArgs)
#: Result and arguments of each function `pagedbatch_NAME`.
FUNCTIONS: dict[str, tuple[Any, Sequence[Any]]] = {
    "attention": (None, [POINTER(AttentionArgs)]),
    "write_kv": (c_bool, [POINTER(WriteKvArgs)]),
    "copy_blocks": (c_bool, [*[c_void_p] * 4, *[c_int64] * 5]),
    "rms_norm": (None, [*[c_void_p] * 3, c_int64, c_int64, c_float, c_int32, c_int32]),
    "layer_norm": (None, [*[c_void_p] * 4, c_int64, c_int64, c_float, c_int32, c_int32]),
    "rope_and_write_kv": (c_bool, [POINTER(RopeArgs)]),
    "panel_width": (c_int32, []),
    "has_matrix_unit": (c_bool, []),
    "pack": (None, [c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int32, c_int32]),
    "gemm": (None, [POINTER(GemmArgs)]),
    "sample": (None, [POINTER(SampleArgs)]),
    "logsumexp": (None, [c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int32, c_int32]),
    "joint_topk": (None, [POINTER(JointTopkArgs)]),
    **{f"sizeof_{struct.__name__}": (c_int64, []) for struct in STRUCTS},
}


def load_kernels() -> ctypes.CDLL:
    """The library with all functions declared, built first if needed.


    Raises:
        BuildError: it can't be built or loaded, or a struct has another size in C++ than here.
    """
    library = load_library()
    for name, (result, arguments) in FUNCTIONS.items():
        function = library[f"pagedbatch_{name}"]
        function.restype, function.argtypes = result, arguments
        setattr(library, f"pagedbatch_{name}", function)
    for struct in STRUCTS:
        size = getattr(library, f"pagedbatch_sizeof_{struct.__name__}")()
        if size != ctypes.sizeof(struct):
            raise BuildError(f"{struct.__name__} has {size} bytes in C++, but {ctypes.sizeof(struct)} in {__name__}")
    return library


def is_bfloat16(tensor: Tensor) -> bool:
    """
    Raises:
        ValueError: it is neither bfloat16 nor float32.
    """
    if tensor.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"expected float32 or bfloat16, got {tensor.dtype}")
    return tensor.dtype == torch.bfloat16


def pointer(tensor: Tensor, dtype: torch.dtype, shape: Sequence[int] | None = None) -> int:
    """The address of a contiguous tensor on the CPU.

    Raises:
        ValueError: it is on another device or not contiguous, or has another dtype, or another shape if one is given.
    """
    has_shape = shape is None or tensor.shape == tuple(shape)
    if tensor.dtype != dtype or not has_shape or not tensor.is_contiguous() or tensor.device.type != "cpu":
        wanted = f"{dtype} {'' if shape is None else list(shape)}".rstrip()
        raise ValueError(f"expected contiguous {wanted} on the CPU, got {tensor.dtype} {list(tensor.shape)}")
    return tensor.data_ptr()

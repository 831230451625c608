"""Finds the files that hold a model's weights, and reads the names, shapes and dtypes of tensors from their headers.

safetensors: eight bytes with the header's length, the header (JSON), the tensors' bytes (huggingface/safetensors).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pagedbatch.errors import UsageError
from pagedbatch.model.config_check import are_counts
from pagedbatch.model.model_files import CONFIG, broken, first_bytes, read_object, refuse_pointer, shown

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # set by the format
_PICKLES = (".bin", ".pth", ".pt", ".ckpt")
_AGAIN = "download it again"

#: The format's names of dtypes.
STORED_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
#: Dtypes that torch doesn't have, or that no model is stored in.
_NAMELESS_DTYPES = frozenset({"F4", "F6_E2M3", "F6_E3M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "C64"})


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a header describes it. `dtype` is None if torch doesn't have it."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    file: Path


def weight_files(folder: Path, named: str | None = None) -> list[Path]:
    """The safetensors files that transformers would load from a folder.

    Args:
        named: the file's name if the config gives it.

    Raises:
        UsageError: there are none, an index is broken, or one that it names is missing; says what there is instead.
    """
    if named is not None:
        if not (folder / named).is_file():
            raise UsageError(f"{folder / CONFIG}: transformers_weights names {shown(named)}, which is not there")
        return [folder / named] if not named.endswith(".json") else _shards(folder / named)
    if (folder / WEIGHTS).exists() or (folder / WEIGHTS).is_symlink():
        return [folder / WEIGHTS]
    if (folder / INDEX).exists():
        return _shards(folder / INDEX)
    raise UsageError(f"model {str(folder)!r} can't be loaded: {_instead_of_weights(folder)}")


def holds_weights(folder: Path) -> bool:
    """Whether a folder has weights of any kind, an index of weights, or an adapter."""
    return any(path.name in (INDEX, ADAPTER) or path.suffix in (".safetensors", *_PICKLES) for path in folder.iterdir())


def _shards(index: Path) -> list[Path]:
    table = read_object(index)
    weight_map, metadata = table.get("weight_map"), table.get("metadata")
    if not isinstance(metadata, dict):
        raise UsageError(f"{index}: metadata must be an object, got {shown(metadata)}")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UsageError(f"{index}: weight_map must be an object of tensor names and files, got {shown(weight_map)}")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name or not name:
            raise UsageError(f"{index}: weight_map.{tensor} must be the name of a file beside it, got {shown(name)}")
    names = sorted(set(weight_map.values()))
    # Of a name that no file can have, os.path's says no where pathlib's raises.
    missing = [name for name in names if not os.path.isfile(index.parent / name)]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UsageError(
            f"{index} can't be loaded: it names {len(names)} files, and {missing[0]}{more} is not there: "
            "finish the download"
        )
    return [index.parent / name for name in names]


def _instead_of_weights(folder: Path) -> str:
    """What a folder without safetensors holds instead, and what to do."""
    names = sorted(path.name for path in folder.iterdir())
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if ADAPTER in names:
        return f"it holds an adapter and no weights: {merge_hint(folder)}"
    if pickles:
        return (
            f"{pickles[0]} is a pickle, which can run code when it is read: convert it, by transformers' "
            "AutoModelForCausalLM.from_pretrained(OLD).save_pretrained(NEW), and copy the tokenizer's files to NEW"
        )
    shards = [name for name in names if name.endswith(".safetensors")]
    if shards:
        return f"there is {shards[0]}, but neither {WEIGHTS} nor {INDEX}, which says what lies where: {_AGAIN}"
    ggufs = [name for name in names if name.endswith(".gguf")]
    if ggufs:
        return f"give the GGUF file itself: {folder / ggufs[0]}"
    return f"neither {WEIGHTS} nor {INDEX} is there: finish the download"


def merge_hint(folder: Path) -> str:
    """What to do with an adapter; names its base model."""
    try:
        base = read_object(folder / ADAPTER).get("base_model_name_or_path")
    except UsageError:
        base = None
    onto = f" (of {base})" if isinstance(base, str) and base.isprintable() and base else ""
    return (
        f"merge it into its base model{onto}, by peft's merge_and_unload() and save_pretrained(NEW), "
        "and give that folder"
    )


def read_headers(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """All tensors of a model's weight files, by name.

    Raises:
        UsageError: a file is no safetensors file, or is incomplete.
    """
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        tensors |= _read_header(file)
    return tensors


def _read_header(file: Path) -> dict[str, StoredTensor]:
    refuse_pointer(file, first_bytes(file))
    size = file.stat().st_size
    if size < _LENGTH_BYTES:
        raise broken(file, f"it is {'empty' if not size else f'{size} bytes long'}: {_AGAIN}")
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
        if length > _MAX_HEADER_BYTES:
            raise broken(file, f"it is no safetensors file: {_AGAIN}")
        data = opened.read(length)
    if len(data) < length:
        raise broken(file, f"it ends within its header, after {size:,} bytes: {_AGAIN}")
    try:
        header = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise broken(file, "it is no safetensors file: its header is no JSON object")
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise broken(file, f"its header's __metadata__ must be an object of texts, got {shown(metadata)}")
    tensors = {name: _read_tensor(entry, name, file) for name, entry in header.items()}
    spans = sorted(entry["data_offsets"] for entry in header.values())
    ends = [0, *(end for _, end in spans)]
    end = _LENGTH_BYTES + length + ends[-1]
    if size < end:
        raise broken(file, f"it ends after {size:,} of {end:,} bytes, the download was cut: {_AGAIN}")
    if size > end or [begin for begin, _ in spans] != ends[:-1]:
        raise broken(file, "its header doesn't say where its tensors lie: they overlap, or leave gaps")
    return tensors


def _read_tensor(entry: Any, name: str, file: Path) -> StoredTensor:
    place = f"{file} can't be loaded: its header's entry of {shown(name)}"
    if not isinstance(entry, dict):
        raise UsageError(f"{place} must be an object, got {shown(entry)}")
    shape, offsets, dtype = (entry.get(key) for key in ("shape", "data_offsets", "dtype"))
    is_known = isinstance(dtype, str) and (dtype in STORED_DTYPES or dtype in _NAMELESS_DTYPES)
    if not is_known or not are_counts(shape) or not are_counts(offsets) or len(offsets) != 2:
        raise UsageError(f"{place} is malformed: {shown(entry)}")
    known = STORED_DTYPES.get(str(dtype))
    if offsets[1] < offsets[0] or (known is not None and math.prod(shape) * known.itemsize != offsets[1] - offsets[0]):
        raise UsageError(f"{place} has another size than its shape says: {shown(entry)}")
    return StoredTensor(tuple(shape), known, file)


def subfolder_hint(folder: Path) -> str:
    """What a folder without a config holds instead, and what to do."""
    names = sorted(path.name for path in folder.iterdir())
    if not names:
        return "the folder is empty"
    if ADAPTER in names:
        return f"it holds an adapter and no model: {merge_hint(folder)}"
    ggufs = [name for name in names if name.endswith(".gguf")]
    if ggufs:
        return f"it holds GGUF files: give one itself, {folder / ggufs[0]}"
    inner = [path.parent for depth in ("*", "*/*") for path in sorted(folder.glob(f"{depth}/{CONFIG}"))]
    if inner:
        others = f" (or one of {len(inner) - 1} others there)" if len(inner) > 1 else ""
        return f"the model lies in a folder of it: give {inner[0]}{others}"
    return f"it has no {CONFIG}"

"""Checks that a checkpoint's tensors are exactly those of its model, from the files' headers.

transformers only warns: it initialises missing tensors at random and drops those that don't fit. Which names fit is
asked of transformers itself, by loading tensors on the meta device.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from pagedbatch.errors import UsageError
from pagedbatch.model.library_errors import is_installed, one_line_errors, quiet
from pagedbatch.model.model_config import meta_model
from pagedbatch.model.model_files import CONFIG, ModelSource
from pagedbatch.model.weight_files import (
    ADAPTER,
    INDEX,
    WEIGHTS,
    StoredTensor,
    holds_weights,
    merge_hint,
    read_headers,
    weight_files,
)

_TOWERS = (
    r"^(model\.)?(vision_tower|vision_model|vision_encoder|visual|vision_embed_tokens|image_newline|audio_tower|"
    r"audio_encoder|multi_modal_projector|mm_projector|embed_vision|embed_audio)(\.|$)"
)
#: Tensors that checkpoints hold and models don't need.
_HARMLESS = re.compile(
    "|".join(
        (
            r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$|(^|\.)rope\.freqs$",  # computed from the config
            r"(^|\.)position_ids$",
            r"\.(attn|attention)\.(bias|masked_bias)$",  # causal masks that GPT-2, GPT-J and GPT-NeoX stored
            r"^v_head\.",  # a value head left from reinforcement learning
            r"(^|\.)mtp(_[a-z]+)?(\.|$)",  # multi-token prediction, for speculative decoding
            r"\.(q|k|v|kv|prob)_scale$",  # of a quantised KV cache, which is not used here
            _TOWERS,  # of images and audio, where the model is loaded for text alone
        )
    )
)
_SCALES = re.compile(
    r"(weight_scale(_inv|_2)?|weight_global_scale|input_scale|input_global_scale|output_scale|activation_scale|"
    r"weight_zero_point|input_zero_point|weight_packed|weight_shape|qweight|qzeros|scales|g_idx|SCB|absmax|quant_map|"
    r"nested_absmax|nested_quant_map|quant_state\.\w+)$"
)
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_HF_QUANT_CONFIG = "hf_quant_config.json"


def check_folder(source: ModelSource, *, ignore_adapter: bool) -> None:
    """
    Raises:
        UsageError: there is an adapter beside the weights. transformers would apply it if peft is installed, and
            ignore it otherwise.
    """
    if source.gguf is not None or ignore_adapter or source.file(ADAPTER) is None:
        return
    folder = source.folder
    merge = "merge it first, by peft's merge_and_unload()" if folder is None else merge_hint(folder)
    if folder is not None and not any((folder / name).exists() for name in (WEIGHTS, INDEX)):
        raise UsageError(f"model {source.name!r} can't be loaded: it holds an adapter and no weights: {merge}")
    raise UsageError(
        f"model {source.name!r} holds weights and beside them an adapter ({ADAPTER}), and it doesn't say which of the "
        f"two shall answer: --ignore-adapter takes the weights alone; for the adapter, {merge}"
    )


@contextlib.contextmanager
def without_adapter(source: ModelSource) -> Iterator[dict[str, str]]:
    """Arguments of `from_pretrained` that name the model without an adapter beside it.

    If peft is installed, transformers applies an adapter that it finds, and no argument prevents that: so it gets a
    folder of links to the other files.
    """
    if source.folder is None or not (source.folder / ADAPTER).exists():
        yield source.arguments
        return
    with tempfile.TemporaryDirectory() as links:
        for file in source.folder.iterdir():
            if not file.name.startswith("adapter_"):
                (Path(links) / file.name).symlink_to(file.resolve())
        yield {"pretrained_model_name_or_path": links}


def checkpoint_tensors(source: ModelSource, config: Any, *, needed: bool) -> dict[str, StoredTensor] | None:
    """The tensors in the headers of a model's weights; None for GGUF, and for weights not yet downloaded from the Hub.

    Args:
        config: the whole config, not only its text part.
        needed: a folder without weights is an error; otherwise it gives None.

    Raises:
        UsageError: weights are missing or broken.
    """
    if source.gguf is not None:
        return None
    named = getattr(config, "transformers_weights", None)
    if source.folder is not None:
        if not needed and not holds_weights(source.folder):
            return None
        return read_headers(weight_files(source.folder, named))
    fetched = source.file(CONFIG)
    try:
        files = [] if fetched is None else weight_files(fetched.parent, named)
    except UsageError:
        return None
    return read_headers(files)


def check_tensors(source: ModelSource, config: Any, tensors: Mapping[str, StoredTensor]) -> None:
    """Compares a checkpoint with the model that its config describes, before any weight is read.

    Args:
        config: the whole config.

    Raises:
        UsageError: no model can be built from the config, or the checkpoint holds less than it needs, or more.
    """
    _refuse_integers(source, config, tensors)
    beyond = [name for name in tensors if _is_beyond(name, config) and not _HARMLESS.search(name)]
    _refuse_unused(source, config, beyond)
    model_class: Any = type(meta_model(config, f"{source.config_place}: no model can be built from it"))
    if not is_installed("accelerate"):  # transformers needs it to load meta tensors
        return
    meta_tensors = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype or torch.uint8, device="meta")
        for name, tensor in tensors.items()
    }
    with one_line_errors(f"model {source.name!r} can't be loaded"), quiet():
        _, report = model_class.from_pretrained(
            None,
            config=config,
            attn_implementation="eager",
            state_dict=meta_tensors,
            device_map={"": "meta"},
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    refuse_misfits(source, config, report)


def refuse_misfits(source: ModelSource, config: Any, report: Mapping[str, Any]) -> None:
    """
    Args:
        config: the whole config.
        report: `loading_info` of transformers.

    Raises:
        UsageError: names the first tensors that are missing, have another shape, or are left over.
    """
    misfits = sorted(f"{name} (stored {_size(stored)}, wanted {_size(wanted)})"
                     for name, stored, wanted in report["mismatched_keys"])  # fmt: skip
    for names, problem in (
        (misfits, "have another shape than its config says"),
        (report["missing_keys"], "are missing"),
    ):
        if names:
            raise UsageError(f"model {source.name!r} can't be loaded: weights {problem}: {_first(names)}")
    _refuse_unused(source, config, report["unexpected_keys"])


def _size(shape: Any) -> str:
    return "x".join(map(str, shape))


def _first(names: Collection[str]) -> str:
    ordered = sorted(names)
    listed = ", ".join(ordered[:3])
    return listed if len(ordered) <= 3 else f"{listed} and {len(ordered) - 3} more"


def _is_beyond(name: str, config: Any) -> bool:
    """Whether the tensor belongs to a layer past the config's number of layers."""
    text = config.get_text_config(decoder=True)
    ahead = _num_prediction_layers(text)
    found = _LAYER.search(name)
    return found is not None and int(found[1]) >= text.num_hidden_layers + ahead


def _num_prediction_layers(text: Any) -> int:
    """Number of multi-token prediction layers, stored after the others."""
    return getattr(text, "num_nextn_predict_layers", None) or 0


def _refuse_unused(source: ModelSource, config: Any, names: Collection[str]) -> None:
    unused = list(_harmful(names, config))
    if not unused:
        return
    place = source.config_place
    raise UsageError(
        f"model {source.name!r} can't be loaded: {len(unused)} of its tensors would not be used: {_first(unused)}; "
        f"{_likely_reason(unused, config, place, source.folder)}"
    )


def _harmful(names: Collection[str], config: Any) -> Iterator[str]:
    text = config.get_text_config(decoder=True)
    ahead = range(text.num_hidden_layers, text.num_hidden_layers + _num_prediction_layers(text))
    for name in names:
        layer = _LAYER.search(name)
        is_ahead = layer is not None and int(layer[1]) in ahead
        is_tied = name == "lm_head.weight" and getattr(text, "tie_word_embeddings", False)
        if not (is_ahead or is_tied or _HARMLESS.search(name)):
            yield name


def _likely_reason(unused: Collection[str], config: Any, place: str, folder: Path | None) -> str:
    if any(_SCALES.search(name) for name in unused):
        if getattr(config, "quantization_config", None) is not None:
            return f"the quantisation is another than {place} says"
        told = folder is not None and (folder / _HF_QUANT_CONFIG).is_file()
        where = f" ({_HF_QUANT_CONFIG} does, which transformers doesn't read)" if told else ""
        return f"the checkpoint is quantised, and {place} has no quantization_config that says so{where}"
    if any(_is_beyond(name, config) for name in unused):
        layers = config.get_text_config(decoder=True).num_hidden_layers
        return f"{place} says num_hidden_layers {layers}, and the checkpoint holds more"
    if all(name.endswith(".bias") for name in unused):
        return f"{place} says that these layers have no bias, or the checkpoint is another model's"
    return f"the checkpoint and {place} are not of one model"


def _refuse_integers(source: ModelSource, config: Any, tensors: Mapping[str, StoredTensor]) -> None:
    """Integer weights mean nothing without their scales."""
    if getattr(config, "quantization_config", None) is not None:
        return
    integers = [name for name, tensor in tensors.items() if name.endswith(".weight") and not _is_floating(tensor)]
    if integers:
        raise UsageError(
            f"model {source.name!r} can't be loaded: weights are stored as integers: {_first(integers)}; "
            f"{source.config_place} has no quantization_config that says what they stand for"
        )


def _is_floating(tensor: StoredTensor) -> bool:
    return tensor.dtype is not None and tensor.dtype.is_floating_point

"""Loads the weights of a Hugging Face causal LM onto a device, in the dtype that is asked for.

A model is a folder, a Hub id or a `.gguf` file. Weights load from safetensors (or GGUF) only, never from a pickle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig

from pagedbatch.errors import UsageError
from pagedbatch.model.checkpoint import check_tensors, checkpoint_tensors, refuse_misfits, without_adapter
from pagedbatch.model.hf_config import whole_config
from pagedbatch.model.library_errors import one_line_errors, quiet
from pagedbatch.model.model_config import ModelConfig, auto_model
from pagedbatch.model.model_defaults import ModelDefaults, model_defaults
from pagedbatch.model.model_files import find_model
from pagedbatch.model.quantization import quantization_problem

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A transformers model with its weights, whose attention layers call ours."""

    model: Any
    dtype: torch.dtype
    device: torch.device
    defaults: ModelDefaults

    @property
    def config(self) -> ModelConfig:
        return self.defaults.config


def load_model(
    model: str,
    *,
    dtype: str,
    device: str,
    trust_remote_code: bool = False,
    ignore_adapter: bool = False,
    defaults: ModelDefaults | None = None,
) -> LoadedModel:
    """Loads the weights for inference.

    Args:
        model: a folder, a Hub id or a `.gguf` file.
        dtype: "auto", "float32", "bfloat16" or "float16"; auto is the checkpoint's on a GPU, and on a CPU bfloat16
            if the CPU multiplies it fast, else float32.
        device: "auto", "cpu" or "cuda"; auto is a GPU if there is one.
        ignore_adapter: as in `model_defaults`.
        defaults: the result of `model_defaults`, if it was called already.

    Raises:
        UsageError: no such model or device, no safetensors, or weights that don't match the config.
        UnsupportedModelError: the model needs something that is missing here.
    """
    # The slowest import of a run: mistakes found before the weights are loaded are reported without it.
    from pagedbatch.model.attention import ATTENTION_NAME, register_attention

    if defaults is None:
        defaults = model_defaults(model, trust_remote_code=trust_remote_code, ignore_adapter=ignore_adapter)
    target = choose_device(device)
    resolved = choose_dtype(dtype, defaults.config.dtype, target)
    source = find_model(model)
    check_weights(model, trust_remote_code=trust_remote_code)
    register_attention()
    with one_line_errors(f"model {model!r} can't be loaded"), quiet(), without_adapter(source) as arguments:
        loaded, report = auto_model(is_encoder_decoder=defaults.config.source is not None).from_pretrained(
            **arguments,
            dtype=resolved,
            attn_implementation=ATTENTION_NAME,
            _attn_implementation=ATTENTION_NAME,  # a config that names one by this key goes before the other
            return_dict=True,  # whatever the config asks for
            use_safetensors=None if source.gguf is not None else True,
            trust_remote_code=trust_remote_code,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            generation_config=GenerationConfig(),  # so that the model's, which was read already, is not
            output_loading_info=True,
        )
        refuse_misfits(source, loaded.config, report)
        loaded.to(target).eval().requires_grad_(False)
    return LoadedModel(loaded, resolved, target, defaults)


def check_weights(model: str, *, trust_remote_code: bool = False, needed: bool = True) -> None:
    """Checks, without reading them, that the weights can be loaded here and match the config.

    Args:
        needed: a folder with a config and no weights is an error.

    Raises:
        UsageError: they can't be loaded, or don't match.
    """
    source = find_model(model)
    config = whole_config(source, trust_remote_code=trust_remote_code)
    tensors = checkpoint_tensors(source, config, needed=needed)
    problem = quantization_problem(config)
    if problem is not None:
        raise UsageError(f"model {model!r} can't be loaded: {problem}")
    if tensors is not None:
        check_tensors(source, config, tensors)


def has_fast_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in hardware."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in ("amx_bf16", "avx512_bf16", "bf16"))


def choose_device(device: str) -> torch.device:
    """The device that "auto", "cpu" or "cuda" means here.

    Raises:
        UsageError: there is no GPU.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no GPU here; use --device cpu")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)


def choose_dtype(dtype: str, stored: torch.dtype | None, device: torch.device) -> torch.dtype:
    """The dtype that `dtype` means on `device`; `stored` is the checkpoint's."""
    if dtype in _DTYPES:
        return _DTYPES[dtype]
    if device.type == "cpu":
        return torch.bfloat16 if has_fast_bfloat16() else torch.float32
    return stored or torch.bfloat16

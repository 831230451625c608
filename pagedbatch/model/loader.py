"""Config, tokenizer and weights of a Hugging Face causal LM. Knows nothing about blocks or rows.

A model is a folder, a Hub id or a `.gguf` file. Weights load from safetensors (or GGUF) only, never from a pickle.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from transformers.utils import logging as hf_logging

from pagedbatch.errors import UsageError
from pagedbatch.model.generation_defaults import take_over
from pagedbatch.model.support import check_supported, common_window, max_model_len

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """What a model says about itself before its weights are loaded.

    `generation` holds values for `GenerationParams` fields from the model's generation_config; `left_out` names what it
    sets beside these and has no counterpart here. `window` is the largest attention window where every layer has one;
    `dtype` that of the checkpoint, where the config says it.
    """

    generation: dict[str, Any]
    eos_token_ids: frozenset[int]
    max_model_len: int
    vocab_size: int
    window: int | None = None
    left_out: tuple[str, ...] = ()
    dtype: torch.dtype | None = None
    num_token_ids: int | None = None
    """Ids from here on are no tokens of the tokenizer: the vocabulary is padded. None: it is not known."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Weights in memory, ready to be called with a flat batch through our attention."""

    model: Any
    config: Any
    dtype: torch.dtype
    device: torch.device
    defaults: ModelDefaults


def load_config(model: str, *, trust_remote_code: bool = False) -> Any:
    """The model's text config.

    Raises:
        UsageError: there is no such model.
    """
    with _one_line_errors(model), _quiet():
        config = AutoConfig.from_pretrained(**_source(model), trust_remote_code=trust_remote_code)
    return config.get_text_config(decoder=True)


def load_tokenizer(model: str, *, trust_remote_code: bool = False) -> Any:
    """The model's tokenizer.

    Raises:
        UsageError: there is no such model, or it has no tokenizer.
    """
    with _one_line_errors(model), _quiet():
        return AutoTokenizer.from_pretrained(**_source(model), trust_remote_code=trust_remote_code)


def num_token_ids(tokenizer: Any, defaults: ModelDefaults) -> int:
    """One more than the last id that is a token, or ends outputs of the model. Ids in between may have holes."""
    last: int = max([*tokenizer.get_vocab().values(), *(i for i in defaults.eos_token_ids if i < defaults.vocab_size)])
    return min(last + 1, defaults.vocab_size)


def model_defaults(model: str, *, trust_remote_code: bool = False) -> ModelDefaults:
    """Limits, end tokens and generation defaults, from the config files alone.

    Raises:
        UsageError: there is no such model, or it is not supported.
    """
    config = load_config(model, trust_remote_code=trust_remote_code)
    check_supported(config)
    generation_config = _generation_config(model, config)
    generation = take_over(generation_config, max_model_len(config))
    dtype = getattr(config, "dtype", None)
    return ModelDefaults(
        generation=generation.values,
        left_out=generation.left_out,
        eos_token_ids=_token_ids(generation_config.eos_token_id) or _token_ids(getattr(config, "eos_token_id", None)),
        max_model_len=max_model_len(config),
        vocab_size=config.vocab_size,
        window=common_window(config),
        dtype=dtype if isinstance(dtype, torch.dtype) else None,
    )


def load_model(
    model: str, *, dtype: str, device: str, trust_remote_code: bool = False, defaults: ModelDefaults | None = None
) -> LoadedModel:
    """Loads the weights for inference.

    Args:
        model: a folder, a Hub id or a `.gguf` file.
        dtype: "auto", "float32", "bfloat16" or "float16"; auto is the checkpoint's on a GPU, and on a CPU bfloat16
            where the CPU multiplies it fast, else float32.
        device: "auto", "cpu" or "cuda"; auto takes a GPU where there is one.
        defaults: what `model_defaults` said, where it was asked already.

    Raises:
        UsageError: no such model or device, or no safetensors.
        UnsupportedModelError: the model needs what is missing here.
    """
    # The slowest import of a run. Here, so that mistakes found before the weights are loaded show without it.
    from transformers import AutoModelForCausalLM

    from pagedbatch.model.attention import ATTENTION_NAME, register_attention

    defaults = defaults or model_defaults(model, trust_remote_code=trust_remote_code)
    target = choose_device(device)
    resolved = choose_dtype(dtype, defaults.dtype, target)
    register_attention()
    source = _source(model)
    with _one_line_errors(model), _quiet():
        loaded, report = AutoModelForCausalLM.from_pretrained(
            **source,
            dtype=resolved,
            attn_implementation=ATTENTION_NAME,
            use_safetensors=None if "gguf_file" in source else True,
            trust_remote_code=trust_remote_code,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            output_loading_info=True,
        )
    _check_complete(model, report)
    loaded.to(target).eval().requires_grad_(False)
    config = loaded.config.get_text_config(decoder=True)
    return LoadedModel(loaded, config, resolved, target, defaults)


def has_fast_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in hardware."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in ("amx_bf16", "avx512_bf16", "bf16"))


def _source(model: str) -> dict[str, str]:
    """Arguments of `from_pretrained` that name the model."""
    path = Path(model)
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise UsageError(f"model {model!r}: no such file")
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    looks_like_path = model.startswith((".", "/", "~")) or model.count("/") > 1
    if looks_like_path and not path.expanduser().is_dir():
        raise UsageError(f"model {model!r}: no such folder (give a folder, a Hub id or a .gguf file)")
    return {"pretrained_model_name_or_path": str(path.expanduser()) if path.expanduser().is_dir() else model}


def _generation_config(model: str, config: Any) -> GenerationConfig:
    """From the model's generation_config.json; where there is none, from its config. A broken one is an error."""
    source = _source(model)
    name = source["pretrained_model_name_or_path"]
    with _one_line_errors(model), _quiet():
        if "gguf_file" not in source and (Path(name) / "generation_config.json").is_file():
            return GenerationConfig.from_pretrained(name)
        if not Path(name).is_dir():
            with contextlib.suppress(OSError):  # a repository on the Hub without one
                return GenerationConfig.from_pretrained(name)
        return GenerationConfig.from_model_config(config)


def _check_complete(model: str, report: dict[str, Any]) -> None:
    """Refuses weights that do not fill the model: the library would make up the rest at random."""
    missing = sorted(report["missing_keys"])
    misfits = sorted(name for name, *_ in report["mismatched_keys"])
    for names, problem in ((misfits, "have another shape than its config says"), (missing, "are missing")):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise UsageError(f"model {model!r} can't be loaded: weights {problem}: {names[0]}{more}")


def _token_ids(value: int | list[int] | None) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset([value] if isinstance(value, int) else value)


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
    """The precision that `dtype` means on `device`, for a checkpoint whose config says `stored`."""
    if dtype in _DTYPES:
        return _DTYPES[dtype]
    if device.type == "cpu":
        return torch.bfloat16 if has_fast_bfloat16() else torch.float32
    return stored or torch.bfloat16


@contextlib.contextmanager
def _one_line_errors(model: str) -> Iterator[None]:
    """Turns what `from_pretrained` raises for a wrong model into one line."""
    try:
        yield
    except (OSError, ValueError, ImportError, KeyError, RuntimeError, SafetensorError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = lines[0] if lines else type(error).__name__
        raise UsageError(f"model {model!r} can't be loaded: {reason}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No loading bars and no notes from the library: progress is ours to show."""
    level = hf_logging.get_verbosity()
    bars = hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity(logging.ERROR)
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()

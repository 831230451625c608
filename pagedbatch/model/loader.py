"""Config, tokenizer and weights of a Hugging Face causal LM. Knows nothing about blocks or rows.

A model is a folder, a Hub id or a `.gguf` file. Weights load from safetensors (or GGUF) only, never from a pickle.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig, PretrainedConfig

from pagedbatch.errors import UsageError
from pagedbatch.model.checkpoint import (
    check_folder,
    check_tensors,
    checkpoint_tensors,
    refuse_misfits,
    without_adapter,
)
from pagedbatch.model.config_check import check_built_config, check_raw_config
from pagedbatch.model.context_length import beyond_config, max_model_len
from pagedbatch.model.generation_defaults import (
    GENERATION_CONFIG,
    EndTokens,
    GenerationDefaults,
    check_generation_config,
    end_tokens,
    read_generation_defaults,
)
from pagedbatch.model.library_errors import one_line_errors, quiet
from pagedbatch.model.model_files import CONFIG, ModelSource, find_model
from pagedbatch.model.quantization import quantization_problem
from pagedbatch.model.support import check_supported, common_window, unsupported_reason
from pagedbatch.model.tokenizer_files import load_tokenizer_of
from pagedbatch.model.weight_files import subfolder_hint

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """What a model says about itself before its weights are loaded.

    `generation` holds values for `GenerationParams` fields from the model's generation_config; `left_out` names what it
    sets beside these and has no counterpart here, `generation_place` is the file. `window` is the largest attention
    window where every layer has one; `dtype` that of the checkpoint, where the config says it. `remarks` are lines that
    the user should see.
    """

    generation: dict[str, Any]
    eos_token_ids: frozenset[int]
    max_model_len: int
    vocab_size: int
    window: int | None = None
    left_out: tuple[str, ...] = ()
    dtype: torch.dtype | None = None
    generation_place: str = GENERATION_CONFIG
    remarks: tuple[str, ...] = ()
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
        UsageError: there is no such model, or its config is broken.
    """
    return _text_part(whole_config(find_model(model), trust_remote_code=trust_remote_code))


def whole_config(source: ModelSource, *, trust_remote_code: bool = False) -> Any:
    """The model's config as its file has it: that of a model that also sees or hears holds a text config.

    Raises:
        UsageError: there is no such model, or its config is broken.
    """
    place = source.config_place
    if source.gguf is None:
        raw = source.json_object(CONFIG)
        if raw is None:
            assert source.folder is not None  # the Hub's answer was an error
            raise UsageError(f"model {source.name!r} can't be loaded: {subfolder_hint(source.folder)}")
        check_raw_config(raw, place)
    with one_line_errors(f"model {source.name!r} can't be loaded: {place}"), quiet():
        config = AutoConfig.from_pretrained(**source.arguments, trust_remote_code=trust_remote_code)
    text = _text_part(config)
    if not isinstance(text, PretrainedConfig):
        raise UsageError(f"{place}: text_config is no part of a {config.model_type!r} model")
    if unsupported_reason(text) is None:
        check_built_config(text, place)
    return config


def _text_part(config: Any) -> Any:
    return config.get_text_config(decoder=True)


def load_tokenizer(model: str, *, trust_remote_code: bool = False) -> Any:
    """The model's tokenizer.

    Raises:
        UsageError: there is no such model, it has no tokenizer, or a broken one.
    """
    source = find_model(model)
    try:
        return load_tokenizer_of(source, trust_remote_code=trust_remote_code)
    except UsageError:
        whole_config(source, trust_remote_code=trust_remote_code)  # which the library reads first
        raise


def num_token_ids(tokenizer: Any, defaults: ModelDefaults) -> int:
    """One more than the last id that is a token, or ends outputs of the model. Ids in between may have holes."""
    ends = (i for i in defaults.eos_token_ids if i < defaults.vocab_size)
    last: int = max((*tokenizer.get_vocab().values(), *ends), default=defaults.vocab_size - 1)
    return min(last + 1, defaults.vocab_size)


def model_defaults(
    model: str,
    *,
    trust_remote_code: bool = False,
    ignore_adapter: bool = False,
    use_generation_config: bool = True,
    asked_model_len: int | None = None,
) -> ModelDefaults:
    """Limits, end tokens and generation defaults, from the config files alone.

    Args:
        ignore_adapter: an adapter that stands beside the weights is left alone; else it is an error.
        use_generation_config: False leaves the generation defaults out, and unread; end tokens always count.
        asked_model_len: the longest sequence, where it is not the config's.

    Raises:
        UsageError: there is no such model, its files are broken, or it is not supported.
    """
    source = find_model(model)
    config = load_config(model, trust_remote_code=trust_remote_code)
    check_supported(config)
    check_folder(source, ignore_adapter=ignore_adapter)
    longest = max_model_len(config, asked_model_len)
    raw, place = _generation_config(source, config)
    end = end_tokens(raw.get("eos_token_id"), config.vocab_size, place)
    if not end.token_ids:
        named = end_tokens(getattr(config, "eos_token_id", None), config.vocab_size, source.config_place)
        end = EndTokens(named.token_ids, end.impossible or named.impossible)
    generation = GenerationDefaults()
    if use_generation_config:
        check_generation_config(raw, place)
        generation = read_generation_defaults(SimpleNamespace(**raw), longest)
    dtype = getattr(config, "dtype", None)
    return ModelDefaults(
        generation=generation.values,
        left_out=generation.left_out,
        eos_token_ids=end.token_ids,
        max_model_len=longest,
        vocab_size=config.vocab_size,
        window=common_window(config),
        dtype=dtype if isinstance(dtype, torch.dtype) else None,
        generation_place=place,
        remarks=tuple(_remarks(end, config, asked_model_len)),
    )


def _remarks(end: EndTokens, config: Any, asked_model_len: int | None) -> Iterator[str]:
    if end.impossible:
        ids = ", ".join(map(str, end.impossible))
        yield f"the model's eos_token_id names {ids}, outside its vocabulary of {config.vocab_size}: left out"
    beyond = beyond_config(config, asked_model_len)
    if beyond is not None:
        yield beyond


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
            where the CPU multiplies it fast, else float32.
        device: "auto", "cpu" or "cuda"; auto takes a GPU where there is one.
        ignore_adapter: as in `model_defaults`.
        defaults: what `model_defaults` said, where it was asked already.

    Raises:
        UsageError: no such model or device, no safetensors, or weights that are not the config's.
        UnsupportedModelError: the model needs what is missing here.
    """
    # The slowest import of a run. Here, so that mistakes found before the weights are loaded show without it.
    from transformers import AutoModelForCausalLM

    from pagedbatch.model.attention import ATTENTION_NAME, register_attention

    if defaults is None:
        defaults = model_defaults(model, trust_remote_code=trust_remote_code, ignore_adapter=ignore_adapter)
    target = choose_device(device)
    resolved = choose_dtype(dtype, defaults.dtype, target)
    source = find_model(model)
    check_weights(model, trust_remote_code=trust_remote_code)
    register_attention()
    with one_line_errors(f"model {model!r} can't be loaded"), quiet(), without_adapter(source) as arguments:
        loaded, report = AutoModelForCausalLM.from_pretrained(
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
    config = _text_part(loaded.config)
    return LoadedModel(loaded, config, resolved, target, defaults)


def check_weights(model: str, *, trust_remote_code: bool = False, needed: bool = True) -> None:
    """Whether the weights can be loaded here and fill the model, as far as that shows without reading them.

    Args:
        needed: a folder that holds a config and no weights is an error.

    Raises:
        UsageError: they can't, or don't.
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


def _generation_config(source: ModelSource, config: Any) -> tuple[dict[str, Any], str]:
    """What a model says about generation: its generation_config.json or, where there is none, its config; and which."""
    raw = source.json_object(GENERATION_CONFIG)
    if raw is not None:
        return raw, str(source.file(GENERATION_CONFIG))
    with one_line_errors(f"model {source.name!r} can't be loaded: {source.config_place}"), quiet():
        from_config: dict[str, Any] = GenerationConfig.from_model_config(config).to_dict()
    return from_config, source.config_place


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

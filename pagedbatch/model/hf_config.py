"""A model's config as transformers reads it, checked before and after."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig

from pagedbatch.errors import UsageError
from pagedbatch.model.config_check import check_built_config, check_raw_config
from pagedbatch.model.library_errors import one_line_errors, quiet
from pagedbatch.model.model_config import unsupported_reason
from pagedbatch.model.model_files import CONFIG, ModelSource, find_model
from pagedbatch.model.weight_files import subfolder_hint


def load_config(model: str, *, trust_remote_code: bool = False) -> Any:
    """The model's text config.

    Raises:
        UsageError: there is no such model, or its config is broken.
    """
    return text_config(whole_config(find_model(model), trust_remote_code=trust_remote_code))


def whole_config(source: ModelSource, *, trust_remote_code: bool = False) -> Any:
    """The model's config as its file has it; that of a model that also takes images or audio contains a text config.

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
    text = text_config(config)
    if not isinstance(text, PretrainedConfig):
        raise UsageError(f"{place}: text_config is no part of a {config.model_type!r} model")
    if unsupported_reason(text) is None:
        check_built_config(text, place)
    return config


def text_config(config: Any) -> Any:
    """The part of a whole config that describes the language model."""
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "text_config", None) is None:
        return config  # a copy made for its decoder would lack the encoder's keys
    return config.get_text_config(decoder=True)

"""Which models this engine can run, decided from the config alone. What it lacks is refused in one sentence."""

from __future__ import annotations

from typing import Any

from pagedbatch.errors import UnsupportedModelError

#: Model types whose every layer routes attention through `AttentionInterface`, tested against Hugging Face.
SUPPORTED_MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})


def check_supported(config: Any) -> None:
    """Refuses a model that needs what is missing here.

    Args:
        config: the model's `transformers.PretrainedConfig`.

    Raises:
        UnsupportedModelError: with the reason in words.
    """
    name = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"model type {name!r} is an encoder-decoder: only decoders (causal LMs) run here")
    if name not in SUPPORTED_MODEL_TYPES:
        known = ", ".join(sorted(SUPPORTED_MODEL_TYPES))
        raise UnsupportedModelError(
            f"model type {name!r} is not supported: its attention was not tested here ({known} were)"
        )

"""Which models this engine can run, decided from the config alone. What it lacks is refused in one sentence."""

from __future__ import annotations

from typing import Any

from pagedbatch.errors import UnsupportedModelError

#: Model types whose every layer routes its attention through `AttentionInterface`; `tests/test_families.py` compares
#: each with Hugging Face's own attention.
# fmt: off
SUPPORTED_MODEL_TYPES = frozenset({
    "afmoe", "apertus", "arcee", "bitnet", "cohere", "cohere2", "cwm", "ernie4_5", "ernie4_5_moe", "exaone4",
    "flex_olmo", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt2", "gpt_bigcode", "gpt_neox",
    "gpt_oss", "gptj", "granite", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "jais2", "llama", "minimax_m2",
    "ministral", "mistral", "mixtral", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt", "persimmon", "phi",
    "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2",
    "vaultgemma",
})
# fmt: on

_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}


def check_supported(config: Any) -> None:
    """Refuses a model that needs what is missing here.

    Args:
        config: the model's (text) config.

    Raises:
        UnsupportedModelError: with the reason in words.
    """
    missing = unsupported_reason(config)
    if missing is not None:
        raise UnsupportedModelError(f"model type {config.model_type!r} can't run here: {missing}")


def unsupported_reason(config: Any) -> str | None:
    """What this engine would need to run the model, or None when it has everything."""
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder, and cross-attention is not supported"
    if getattr(config, "kv_lora_rank", None):
        return "its latent attention (MLA) caches something other than keys and values of one size"
    if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        return "its ALiBi position biases are not supported"
    other_layers = set(getattr(config, "layer_types", None) or ()) - _ATTENTION_LAYERS
    if other_layers:
        kinds = ", ".join(sorted(other_layers))
        return f"it has {kinds} layers, and only full and sliding-window attention is supported"
    if any(hasattr(config, name) for name in ("state_size", "ssm_state_size", "mamba_d_state", "conv_kernel")):
        return "it has state-space layers, whose state the KV pool does not hold"
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        return "its attention has not been compared with Hugging Face's"
    return None


def sliding_windows(config: Any) -> list[int | None]:
    """The sliding window of each layer in tokens, None where the layer sees everything."""
    window = getattr(config, "sliding_window", None)
    if window is None or getattr(config, "use_sliding_window", True) is False:
        return [None] * config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def common_window(config: Any) -> int | None:
    """The largest window, where every layer has one: tokens before it are never looked at again."""
    windows = sliding_windows(config)
    return None if None in windows else max(window for window in windows if window is not None)

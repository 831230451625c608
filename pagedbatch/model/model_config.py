"""What a model's config says about running it here: shapes, windows, limits, or why it can't run. Reads no weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from pagedbatch_kernels.interface import CacheShape

from pagedbatch.errors import UnsupportedModelError
from pagedbatch.model.context_length import ContextLength, context_length
from pagedbatch.model.library_errors import one_line_errors, quiet

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

#: Encoder-decoders of which the same is true.
ENCODER_DECODER_MODEL_TYPES = frozenset(
    {"bart", "blenderbot", "m2m_100", "marian", "mbart", "mt5", "pegasus", "plbart", "t5", "umt5"}
)

_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, slots=True)
class SourceConfig:
    """What the encoder of an encoder-decoder reads."""

    vocab_size: int
    padding_id: int | None  #: positions don't count this id; None: they count all


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model as the engine sees it, read from its config once. Of an encoder-decoder, layers and heads are the
    decoder's."""

    model_type: str
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    context: ContextLength
    sliding_windows: tuple[int | None, ...]  #: of each layer, in tokens; None: it sees everything
    softcap: float | None  #: of attention scores
    has_sinks: bool
    dtype: torch.dtype | None  #: of the checkpoint, where the config says it
    source: SourceConfig | None = None  #: None: it is a decoder

    @classmethod
    def from_hf(cls, config: Any) -> ModelConfig:
        """Reads a (text) config of transformers."""
        if getattr(config, "is_encoder_decoder", False):
            return cls._of_encoder_decoder(config)
        num_kv_heads = _read_by_model(config, "num_key_value_heads") or config.num_attention_heads
        dtype = getattr(config, "dtype", None)
        return cls(
            model_type=config.model_type,
            vocab_size=config.vocab_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=1 if getattr(config, "multi_query", False) else num_kv_heads,  # GPT-BigCode's name for one
            head_size=_read_by_model(config, "head_dim") or config.hidden_size // config.num_attention_heads,
            context=context_length(config),
            sliding_windows=tuple(sliding_windows(config)),
            softcap=getattr(config, "attn_logit_softcapping", None),
            has_sinks=config.model_type == "gpt_oss",
            dtype=dtype if isinstance(dtype, torch.dtype) else None,
        )

    @classmethod
    def _of_encoder_decoder(cls, config: Any) -> ModelConfig:
        dtype = getattr(config, "dtype", None)
        num_layers = getattr(config, "decoder_layers", None) or config.num_decoder_layers
        num_heads = getattr(config, "decoder_attention_heads", None) or config.num_attention_heads
        return cls(
            model_type=config.model_type,
            vocab_size=getattr(config, "decoder_vocab_size", None) or config.vocab_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_size=getattr(config, "d_kv", None) or config.hidden_size // num_heads,
            context=context_length(config),
            sliding_windows=(None,) * num_layers,
            softcap=None,
            has_sinks=False,
            dtype=dtype if isinstance(dtype, torch.dtype) else None,
            source=SourceConfig(
                vocab_size=config.vocab_size,
                padding_id=config.pad_token_id if config.model_type == "m2m_100" else None,
            ),
        )

    @property
    def max_window(self) -> int | None:
        """The largest window if every layer has one: no layer looks at tokens before it again."""
        windows = [window for window in self.sliding_windows if window is not None]
        return max(windows) if windows and len(windows) == self.num_layers else None

    def cache_shape(self, block_size: int) -> CacheShape:
        return CacheShape(self.num_layers, block_size, self.num_kv_heads, self.head_size)

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of K and V of one token, all layers."""
        return self.cache_shape(1).block_bytes(dtype)


def _read_by_model(config: Any, name: str) -> Any:
    """A key about heads; None where the library's model of this type has no grouped queries and never reads it."""
    kind = type(config)
    if kind.__module__.startswith("transformers.") and "num_key_value_heads" not in {*dir(kind), *kind.attribute_map}:
        return None
    return getattr(config, name, None)


def sliding_windows(config: Any) -> list[int | None]:
    """The sliding window of each layer in tokens, None where the layer sees everything."""
    window = getattr(config, "sliding_window", None)
    if window is None or getattr(config, "use_sliding_window", True) is False:
        return [None] * config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def check_supported(config: Any) -> None:
    """
    Args:
        config: the model's (text) config.

    Raises:
        UnsupportedModelError: the model needs something that is missing here; says what.
    """
    reason = unsupported_reason(config)
    if reason is not None:
        raise UnsupportedModelError(f"model type {config.model_type!r} can't run here: {reason}")


def unsupported_reason(config: Any) -> str | None:
    """What this engine lacks to run the model of a (text) config, None when nothing."""
    if getattr(config, "is_encoder_decoder", False):
        is_known = config.model_type in ENCODER_DECODER_MODEL_TYPES
        return None if is_known else "it is an encoder-decoder that has not been compared with Hugging Face's"
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


def num_parameters(config: Any) -> int:
    """Number of weights of a model of this config, tied ones counted once. None of them is allocated."""
    model = meta_model(config, "no model can be built from its config")
    return sum(weight.numel() for weight in model.parameters())


def meta_model(config: Any, error: str) -> Any:
    """The model of a config without values in its weights.

    Raises:
        UsageError: no model can be built; begins with `error`.
    """
    # The attention that the config asks for may not be installed, and is not used here.
    with one_line_errors(error), quiet(), torch.device("meta"):
        kind = auto_model(is_encoder_decoder=getattr(config, "is_encoder_decoder", False))
        return kind.from_config(config, attn_implementation="eager")


def auto_model(*, is_encoder_decoder: bool) -> Any:
    """The class of transformers that makes such models."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    return AutoModelForSeq2SeqLM if is_encoder_decoder else AutoModelForCausalLM

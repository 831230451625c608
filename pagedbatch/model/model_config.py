"""What a model's config says about running it here: cache size, attention features, limits. No weights are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pagedbatch.model.context_length import context_length
from pagedbatch.model.kv_cache import cache_shape
from pagedbatch.model.library_errors import one_line_errors, quiet
from pagedbatch.model.support import sliding_windows, unsupported_reason


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model as the engine sees it.

    `limit_note` says how `max_model_len` comes about where that is not plain. `windows` lists each sliding window once
    with the number of layers that have it; `missing` says what the engine lacks to run the model, None when nothing.
    """

    model_type: str
    missing: str | None
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_model_len: int
    limit_note: str | None
    vocab_size: int
    windows: dict[int, int]
    softcap: float | None
    has_sinks: bool
    checkpoint_dtype: torch.dtype | None

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of K and V of one token, all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * dtype.itemsize


def model_facts(config: Any) -> ModelFacts:
    """Reads a (text) config."""
    shape = cache_shape(config, block_size=1)
    limit = context_length(config)
    dtype = getattr(config, "dtype", None)
    return ModelFacts(
        model_type=config.model_type,
        missing=unsupported_reason(config),
        num_layers=shape.num_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        max_model_len=limit.tokens,
        limit_note=limit.why,
        vocab_size=config.vocab_size,
        windows=_windows(config),
        softcap=getattr(config, "attn_logit_softcapping", None),
        has_sinks=config.model_type == "gpt_oss",
        checkpoint_dtype=dtype if isinstance(dtype, torch.dtype) else None,
    )


def num_parameters(config: Any) -> int:
    """How many weights a model of this config has, tied ones counted once; none of them is made."""
    from transformers import AutoModelForCausalLM

    with one_line_errors("no model can be built from its config"), quiet(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")  # whatever the config asks for
    return sum(weight.numel() for weight in model.parameters())


def _windows(config: Any) -> dict[int, int]:
    windows = [window for window in sliding_windows(config) if window is not None]
    return {window: windows.count(window) for window in sorted(set(windows))}

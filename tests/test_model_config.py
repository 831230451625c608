"""What is read from configs: shapes, windows, limits, and why a model is not supported."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pagedbatch_kernels.interface import CacheShape
from transformers import AutoConfig, GPT2Config

from pagedbatch.model.model_config import ModelConfig, sliding_windows, unsupported_reason


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("led", "an encoder-decoder that has not been compared"),
        ("bloom", "ALiBi"),
        ("mpt", "ALiBi"),
        ("mamba", "linear_attention layers"),
        ("jamba", "linear_attention layers"),
        ("falcon_h1", "hybrid layers"),
        ("qwen3_next", "linear_attention layers"),
        ("llama4_text", "chunked_attention layers"),
        ("deepseek_v3", r"MLA"),
        ("lfm2", "not been compared"),
    ],
)
def test_what_is_not_supported_is_said_in_words(model_type: str, reason: str) -> None:
    found = unsupported_reason(AutoConfig.for_model(model_type))
    assert found is not None
    assert reason in found


def test_windows_come_from_the_layer_types() -> None:
    config = AutoConfig.for_model("gemma2", num_hidden_layers=4, sliding_window=64)
    assert sliding_windows(config) == [64, None, 64, None]
    assert ModelConfig.from_hf(config).sliding_windows == (64, None, 64, None)
    assert ModelConfig.from_hf(config).softcap == 50.0
    assert sliding_windows(AutoConfig.for_model("mistral", num_hidden_layers=2, sliding_window=9)) == [9, 9]
    assert sliding_windows(AutoConfig.for_model("qwen2", num_hidden_layers=2)) == [None, None]


def test_a_window_is_common_when_every_layer_has_one() -> None:
    assert ModelConfig.from_hf(AutoConfig.for_model("mistral", num_hidden_layers=2, sliding_window=9)).max_window == 9
    assert ModelConfig.from_hf(AutoConfig.for_model("gemma2", num_hidden_layers=2, sliding_window=9)).max_window is None
    assert ModelConfig.from_hf(AutoConfig.for_model("llama")).max_window is None


def test_batch_dependent_rotary_scaling_keeps_to_the_original_length() -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 128}
    config = AutoConfig.for_model("llama", max_position_embeddings=512, rope_parameters=rope)
    assert ModelConfig.from_hf(config).context.max_model_len() == 128
    assert (
        ModelConfig.from_hf(AutoConfig.for_model("llama", max_position_embeddings=512)).context.max_model_len() == 512
    )


def cache_shape(config: Any) -> CacheShape:
    return ModelConfig.from_hf(config).cache_shape(16)


def test_shape_from_a_config() -> None:
    config = SimpleNamespace(model_type="llama", vocab_size=8, max_position_embeddings=64)
    config.hidden_size, config.num_attention_heads, config.num_hidden_layers = 64, 4, 3
    assert cache_shape(config) == CacheShape(num_layers=3, block_size=16, num_kv_heads=4, head_size=16)
    config.head_dim, config.num_key_value_heads = 24, 1
    assert cache_shape(config) == CacheShape(num_layers=3, block_size=16, num_kv_heads=1, head_size=24)
    assert cache_shape(config).block_bytes(torch.float16) == 3 * 2 * 16 * 1 * 24 * 2


def test_keys_that_models_without_grouped_queries_do_not_read() -> None:
    config = GPT2Config(n_embd=64, n_head=4, n_layer=3, num_key_value_heads=2, head_dim=8)
    assert cache_shape(config) == CacheShape(num_layers=3, block_size=16, num_kv_heads=4, head_size=16)

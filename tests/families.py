"""Tiny configs of every supported model family, with the features of its attention switched on."""

from __future__ import annotations

from typing import Any

COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
#: Families without grouped queries; their configs don't know these names.
MHA_ONLY = {"gpt2", "gpt_bigcode", "gpt_neox", "gptj", "opt", "persimmon"}
GQA_KEYS = {"num_key_value_heads", "head_dim"}
MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 11}

#: model type -> what its tiny config sets beside `COMMON`.
FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": {**ALTERNATING, **MOE},
    "apertus": {},
    "arcee": {},
    "bitnet": {},
    "cohere": {"logit_scale": 0.5},
    "cohere2": ALTERNATING,
    "cwm": {},
    "ernie4_5": {},
    "ernie4_5_moe": MOE,
    "exaone4": ALTERNATING,
    "flex_olmo": MOE,
    "gemma": {},
    "gemma2": {
        **ALTERNATING,
        "initializer_range": 0.1,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 30.0,
        "query_pre_attn_scalar": 9,
    },
    "gemma3_text": {**ALTERNATING, "initializer_range": 0.1, "query_pre_attn_scalar": 9},
    "glm": {},
    "glm4": {},
    "glm4_moe": MOE,
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "gpt_bigcode": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "gpt_neox": {},
    "gpt_oss": {**ALTERNATING, **MOE},
    "gptj": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "rotary_dim": 8},
    "granite": {"attention_multiplier": 0.3},
    "helium": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": MOE,
    "jais2": {},
    "llama": {},
    "minimax_m2": MOE,
    "ministral": ALTERNATING,
    "mistral": {"sliding_window": 11},
    "mixtral": MOE,
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": ALTERNATING,
    "olmoe": MOE,
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "persimmon": {},
    "phi": {},
    "phi3": {"sliding_window": 11},
    "phimoe": MOE,
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 11},
    "qwen2_moe": MOE,
    "qwen3": {},
    "qwen3_moe": MOE,
    "seed_oss": {},
    "smollm3": {"no_rope_layers": [1, 0]},
    "stablelm": {},
    "starcoder2": {"sliding_window": 11},
    "vaultgemma": {**ALTERNATING, "initializer_range": 0.1},
}

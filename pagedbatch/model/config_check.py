"""Checks config.json: types and ranges of keys before transformers reads them, and afterwards whether numbers fit.

transformers rejects some mistakes in its own words, accepts others, and fails on the rest with a traceback.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from pagedbatch.errors import UsageError
from pagedbatch.model.model_config import sliding_windows
from pagedbatch.model.model_files import shown

_MAX_LAYERS = 2000
_MAX_EXPERTS = 20_000
_MAX_WIDTH = 2**24
_MAX_TOKENS = 2**31 - 1
_MAX_VOCABULARY = 10**8
_MAX_FACTOR = 10**6


@dataclass(frozen=True, slots=True)
class Rule:
    """What a value must be, in words and as a predicate. `null`: null is allowed and means the default."""

    says: str
    holds: Callable[[Any], bool]
    null: bool = False


def is_integer(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def are_counts(value: Any) -> TypeGuard[list[int]]:
    """Whether it is a list of integers of 0 or more."""
    return isinstance(value, list) and all(is_integer(item) and item >= 0 for item in value)


def is_number(value: Any) -> bool:
    """Whether it is a finite number that a float can hold."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _count(maximum: int, *, null: bool = False, minimum: int = 1) -> Rule:
    def holds(value: Any) -> bool:
        return is_integer(value) and minimum <= value <= maximum

    return Rule(f"an integer from {minimum} to {maximum:,}", holds, null)


def _number(says: str, holds: Callable[[float], bool], *, null: bool = False) -> Rule:
    return Rule(f"a finite number {says}", lambda value: is_number(value) and holds(value), null)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_dtype(value: Any) -> bool:
    name = value.removeprefix("torch.") if isinstance(value, str) else ""
    return name == "auto" or isinstance(getattr(torch, name, None), torch.dtype)


def _is_token_ids(value: Any) -> bool:
    return is_integer(value) or (isinstance(value, list) and all(is_integer(item) for item in value))


_ABOVE_0 = _number("above 0", lambda value: value > 0)
_ABOVE_0_OR_NULL = _number("above 0, or null", lambda value: value > 0, null=True)
_AT_LEAST_0 = _number("of 0 or more", lambda value: value >= 0)
_SHARE = _number("above 0 and at most 1", lambda value: 0 < value <= 1, null=True)
_EPSILON = _number("from 0 to 1", lambda value: 0 <= value <= 1)
_PROBABILITY = _number("from 0 to 1", lambda value: 0 <= value <= 1, null=True)
_WIDTH = _count(_MAX_WIDTH)
_WIDTH_OR_NULL = _count(_MAX_WIDTH, null=True)
_LAYERS = _count(_MAX_LAYERS)
_EXPERTS = _count(_MAX_EXPERTS, null=True)
_TOKENS = _count(_MAX_TOKENS)
_TOKENS_OR_NULL = _count(_MAX_TOKENS, null=True)
_TEXT = Rule("a text", lambda value: isinstance(value, str))
_OBJECT_OR_NULL = Rule("an object or null", lambda value: isinstance(value, dict), null=True)
_DTYPE = Rule(
    'the name of a precision, such as "bfloat16"', lambda value: isinstance(value, dict) or _is_dtype(value), null=True
)
_TOKEN_IDS = Rule("a token id or a list of them", _is_token_ids, null=True)
_NAMES = Rule("a list of texts", _is_names, null=True)
_NUMBERS = Rule(
    "a list of numbers above 0",
    lambda value: isinstance(value, list) and bool(value) and all(is_number(item) and item > 0 for item in value),
    null=True,
)

#: Keys of a (text) config that many families share; transformers checks what else a family has.
_RULES: dict[str, Rule] = {
    "model_type": _TEXT,
    "architectures": _NAMES,
    "dtype": _DTYPE,
    "torch_dtype": _DTYPE,
    "transformers_weights": Rule("the name of a file", lambda value: isinstance(value, str) and bool(value), null=True),
    "auto_map": _OBJECT_OR_NULL,
    "text_config": _OBJECT_OR_NULL,
    "quantization_config": _OBJECT_OR_NULL,
    "rope_scaling": _OBJECT_OR_NULL,
    "rope_parameters": _OBJECT_OR_NULL,
    "rope_theta": _ABOVE_0_OR_NULL,
    "vocab_size": _count(_MAX_VOCABULARY),
    "eos_token_id": _TOKEN_IDS,
    "layer_types": _NAMES,
    "hidden_act": _TEXT,
    "activation_function": _TEXT,
    **dict.fromkeys(("hidden_size", "intermediate_size", "num_attention_heads", "n_embd", "n_head", "ffn_dim"), _WIDTH),
    **dict.fromkeys(
        ("num_key_value_heads", "head_dim", "n_inner", "word_embed_proj_dim", "rotary_dim"), _WIDTH_OR_NULL
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layer"), _LAYERS),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), _TOKENS),
    "sliding_window": _count(_MAX_TOKENS, null=True, minimum=0),  # 0 where it is not used
    "original_max_position_embeddings": _TOKENS_OR_NULL,
    **dict.fromkeys(("num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok"), _EXPERTS),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"), _EPSILON),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), _SHARE),
    **dict.fromkeys(("n_group", "topk_group", "moe_k"), _count(_MAX_EXPERTS)),
    **dict.fromkeys(
        ("attention_dropout", "hidden_dropout", "dropout", "embd_pdrop", "resid_pdrop", "attn_pdrop"), _PROBABILITY
    ),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "logits_scaling"), _ABOVE_0_OR_NULL),
    **dict.fromkeys(("query_pre_attn_scalar", "attention_multiplier"), _ABOVE_0_OR_NULL),
    **dict.fromkeys(
        ("logit_scale", "embedding_multiplier", "residual_multiplier"), _number("", lambda _: True, null=True)
    ),
}

#: Keys of a RoPE scaling.
_ROPE_RULES: dict[str, Rule] = {
    "rope_type": _TEXT,
    "type": _TEXT,
    "rope_theta": _ABOVE_0_OR_NULL,
    "factor": _number(f"above 0 and at most {_MAX_FACTOR:,}", lambda value: 0 < value <= _MAX_FACTOR, null=True),
    "original_max_position_embeddings": _TOKENS_OR_NULL,
    "partial_rotary_factor": _SHARE,
    "attention_factor": _number("of 0 or more", lambda value: value >= 0, null=True),
    **dict.fromkeys(("beta_fast", "beta_slow"), _ABOVE_0_OR_NULL),
    **dict.fromkeys(("mscale", "mscale_all_dim"), _number("", lambda _: True, null=True)),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor"), _ABOVE_0),
    **dict.fromkeys(("short_factor", "long_factor"), _NUMBERS),
}


def check_raw_config(raw: Mapping[str, Any], place: str) -> None:
    """
    Args:
        raw: the object in config.json.
        place: the file's name for messages.

    Raises:
        UsageError: a key's value has the wrong type or is out of range.
    """
    if raw.get("model_type") is None:
        raise UsageError(f"{place} has no model_type: it doesn't say which model this is")
    _check_table(raw, place, "")
    _check_table(raw.get("text_config") or {}, place, "text_config.")


def _check_table(table: Mapping[str, Any], place: str, prefix: str) -> None:
    for key, problem in _problems(table, _RULES):
        raise UsageError(f"{place}: {prefix}{key} {problem}")
    for name in ("rope_scaling", "rope_parameters"):
        _check_rope(table.get(name) or {}, f"{place}: {prefix}{name}")


def _problems(table: Mapping[str, Any], rules: Mapping[str, Rule]) -> Iterator[tuple[str, str]]:
    for key, rule in rules.items():
        if key not in table:
            continue
        value = table[key]
        if not (rule.holds(value) or (value is None and rule.null)):
            yield key, f"must be {rule.says.strip()}, got {shown(value)}"


def _check_rope(rope: Mapping[str, Any], place: str) -> None:
    """Checks a scaling for all layers, or one for each type of layer."""
    for key, problem in _problems(rope, _ROPE_RULES):
        raise UsageError(f"{place}.{key} {problem}")
    if "low_freq_factor" in rope and "high_freq_factor" in rope and rope["high_freq_factor"] <= rope["low_freq_factor"]:
        raise UsageError(f"{place}.high_freq_factor must be above low_freq_factor, got {rope['high_freq_factor']}")
    for name, inner in rope.items():
        if isinstance(inner, dict):
            _check_rope(inner, f"{place}.{name}")


def check_built_config(config: Any, place: str) -> None:
    """Checks whether the numbers of a (text) config, its class's defaults included, fit together.

    Raises:
        UsageError: no model can be built from them.
    """
    heads = _positive(config, "num_attention_heads", place)
    hidden = _positive(config, "hidden_size", place)
    for name in ("num_hidden_layers", "vocab_size", "max_position_embeddings"):
        if name != "max_position_embeddings" or hasattr(config, name):  # T5 has none
            _positive(config, name, place)
    kv_heads = getattr(config, "num_key_value_heads", None)
    if is_integer(kv_heads) and (kv_heads < 1 or heads % kv_heads):
        raise UsageError(f"{place}: num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}")
    if getattr(config, "head_dim", None) is None and hidden % heads:
        raise UsageError(f"{place}: num_attention_heads {heads} does not divide hidden_size {hidden}")
    kinds = getattr(config, "layer_types", None)
    if isinstance(kinds, list) and len(kinds) != config.num_hidden_layers:
        raise UsageError(
            f"{place}: layer_types names {len(kinds)} layers, num_hidden_layers is {config.num_hidden_layers}"
        )
    padding = getattr(config, "pad_token_id", None)
    if padding is not None and not (is_integer(padding) and -config.vocab_size <= padding < config.vocab_size):
        raise UsageError(f"{place}: pad_token_id {shown(padding)} lies outside the vocabulary of {config.vocab_size}")
    if any(window is not None and window < 1 for window in sliding_windows(config)):
        raise UsageError(
            f"{place}: sliding_window must be at least 1 where layers have one, got {config.sliding_window}"
        )
    _check_experts(config, place)
    _check_longrope(config, hidden // heads, place)
    _check_names(config, place)


def _positive(config: Any, name: str, place: str) -> int:
    value = getattr(config, name, None)
    if not is_integer(value) or value < 1:
        raise UsageError(f"{place}: {name} must be an integer of at least 1, got {shown(value)}")
    return value


def _check_experts(config: Any, place: str) -> None:
    num_active = getattr(config, "num_experts_per_tok", None) or getattr(config, "moe_k", None)
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    present = [(name, getattr(config, name, None)) for name in names]
    for name, number in present:
        if is_integer(num_active) and is_integer(number) and not 1 <= num_active <= number:
            raise UsageError(f"{place}: {num_active} experts per token (num_experts_per_tok) of {name} {number}")
    groups, chosen_groups = (getattr(config, name, None) for name in ("n_group", "topk_group"))
    if is_integer(groups) and is_integer(chosen_groups) and chosen_groups > groups:
        raise UsageError(f"{place}: topk_group {chosen_groups} is more than n_group {groups}")


def _check_longrope(config: Any, head_size: int, place: str) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    rotated = int((getattr(config, "head_dim", None) or head_size) * (rope.get("partial_rotary_factor") or 1.0))
    for key in ("short_factor", "long_factor"):
        factors = rope.get(key)
        if isinstance(factors, list) and len(factors) != rotated // 2:
            raise UsageError(f"{place}: {key} must hold {rotated // 2} numbers, one per frequency, got {len(factors)}")


def _check_names(config: Any, place: str) -> None:
    """Checks names that transformers looks up while it builds the model."""
    from transformers.activations import ACT2FN
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for key in ("hidden_act", "hidden_activation", "activation_function"):
        name = getattr(config, key, None)
        if name is not None and name not in ACT2FN:
            raise UsageError(f"{place}: {key} {shown(name)} is no activation that transformers has")
    rope = getattr(config, "rope_parameters", None) or {}
    known = {"default", getattr(config, "default_rope_type", "default"), *ROPE_INIT_FUNCTIONS}
    for scaling in (rope, *(inner for inner in rope.values() if isinstance(inner, dict))):
        name = scaling.get("rope_type", "default")
        if name not in known:
            raise UsageError(
                f"{place}: rope_type {shown(name)} is no rotary scaling that transformers has; "
                f"it has {', '.join(sorted(known))}"
            )

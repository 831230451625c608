"""A model's generation_config in this engine's words: values taken over, and the names of those that can't be.

Knows no file. End tokens are read elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import GenerationConfig

#: Names there -> names here.
_TAKEN = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
    "repetition_penalty": "repetition_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "num_beams": "num_beams",
    "length_penalty": "length_penalty",
    "early_stopping": "early_stopping",
    "num_beam_groups": "num_beam_groups",
    "diversity_penalty": "diversity_penalty",
}
#: The same for what counts only where the model samples.
_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
#: Controls that change what is generated and have no counterpart here, with the value at which they do nothing.
_LACKED: dict[str, Any] = {
    "min_length": 0,
    "max_time": None,
    "num_return_sequences": 1,
    "typical_p": 1.0,
    "top_h": None,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "encoder_repetition_penalty": 1.0,
    "encoder_no_repeat_ngram_size": 0,
    "renormalize_logits": False,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "begin_suppress_tokens": None,
    "sequence_bias": None,
    "token_healing": False,
    "guidance_scale": 1,
    "watermarking_config": None,
    "penalty_alpha": 0.0,
    "dola_layers": None,
    "constraints": None,
    "force_words_ids": None,
}


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Values for fields of `GenerationParams`, and the names of set controls that are left out."""

    values: dict[str, Any] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()


def take_over(config: GenerationConfig, max_model_len: int) -> GenerationDefaults:
    """The defaults of a model of `max_model_len` tokens at most."""

    def said(name: str) -> Any:
        return getattr(config, name, None)

    left_out = [name for name, neutral in _LACKED.items() if said(name) not in (None, neutral)]
    values = {here: said(there) for there, here in _TAKEN.items() if said(there) is not None}
    if said("do_sample") and values.get("num_beams", 1) > 1:
        left_out.append("do_sample with num_beams")
    elif said("do_sample"):
        values |= {name: said(name) for name in _SAMPLING if said(name) is not None}
    bad_words = [*(said("bad_words_ids") or []), *([token_id] for token_id in said("suppress_tokens") or [])]
    if bad_words:
        values["bad_words"] = bad_words
    if (said("max_length") or max_model_len) < max_model_len and said("max_new_tokens") is None:
        left_out.append("max_length")
    return GenerationDefaults(values, tuple(left_out))

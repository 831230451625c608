"""Defaults from a model's generation_config.json: values for `GenerationParams`, controls left out, end tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pagedbatch.errors import ParamError, UsageError
from pagedbatch.model.config_check import are_counts, is_integer
from pagedbatch.model.model_files import shown
from pagedbatch.params import resolve

GENERATION_CONFIG = "generation_config.json"

#: Names in generation_config.json -> names of `GenerationParams`.
_NAMES = {
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
    "forced_bos_token_id": "forced_bos_token_id",
    "forced_eos_token_id": "forced_eos_token_id",
}
#: Names that are the same in both, and count only with `do_sample`.
_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
#: Controls that are not supported here, with the value at which they do nothing.
_UNSUPPORTED: dict[str, Any] = {
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
    """Values for fields of `GenerationParams`, names of set controls that are left out, and the file's name."""

    values: dict[str, Any] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    place: str = GENERATION_CONFIG


def read_generation_defaults(
    config: Any, max_model_len: int, place: str = GENERATION_CONFIG, *, is_encoder_decoder: bool = False
) -> GenerationDefaults:
    """
    Args:
        config: has the keys of a generation_config as attributes; missing ones are not set.
        max_model_len: a `max_length` below this counts as set.
        place: the file's name for messages.
        is_encoder_decoder: lengths then count the decoder's start token and new tokens, and can be had here.
    """

    def said(name: str) -> Any:
        return getattr(config, name, None)

    left_out = [name for name, neutral in _UNSUPPORTED.items() if said(name) not in (None, neutral)]
    values = {here: said(there) for there, here in _NAMES.items() if said(there) is not None}
    if isinstance(values.get("forced_eos_token_id"), list):
        first, *others = values.pop("forced_eos_token_id") or (None,)
        values |= {} if others or first is None else {"forced_eos_token_id": first}
        left_out += ["forced_eos_token_id"] if others else []
    if said("do_sample") and values.get("num_beams", 1) > 1:
        left_out.append("do_sample with num_beams")
    elif said("do_sample"):
        values |= {name: said(name) for name in _SAMPLING if said(name) is not None}
    bad_words = [*(said("bad_words_ids") or []), *([token_id] for token_id in said("suppress_tokens") or [])]
    if bad_words:
        values["bad_words"] = bad_words
    if is_encoder_decoder:
        left_out = [name for name in left_out if name != "min_length"]
        lengths = {"max_tokens": said("max_length"), "min_tokens": said("min_length")}
        values = {name: max(0, length - 1) for name, length in lengths.items() if length} | values
        if "max_tokens" in values:
            values["min_tokens"] = min(values.get("min_tokens", 0), values["max_tokens"])
    elif (said("max_length") or max_model_len) < max_model_len and said("max_new_tokens") is None:
        left_out.append("max_length")
    return GenerationDefaults(values, tuple(left_out), place)


def check_generation_config(raw: Mapping[str, Any], place: str) -> None:
    """
    Args:
        raw: what the file holds.
        place: the file's name for messages.

    Raises:
        UsageError: a default that would be used has a wrong type or is out of range.
    """

    def refuse(key: str, problem: str) -> None:
        raise UsageError(
            f"{place}: {key} {problem}; mend it, or leave the model's defaults out: --generation-config none"
        )

    sample = raw.get("do_sample")
    if sample is not None and not isinstance(sample, bool):
        refuse("do_sample", f"must be true or false, got {shown(sample)}")
    sampling = {name: name for name in _SAMPLING} if sample else {}
    for there, here in {**_NAMES, **sampling}.items():
        if raw.get(there) is None or (there == "forced_eos_token_id" and are_counts(raw[there])):
            continue
        try:
            resolve({}, {**_beside(here, raw[there]), here: raw[there]})
        except ParamError as error:
            refuse(there, f"is refused: {error}")
    length = raw.get("max_length")
    if length is not None and not is_integer(length):
        refuse("max_length", f"must be an integer, got {shown(length)}")
    for key, holds, says in (
        ("suppress_tokens", are_counts, "a list of token ids"),
        ("bad_words_ids", _are_words, "a list of lists of token ids"),
    ):
        if raw.get(key) is not None and not holds(raw[key]):
            refuse(key, f"must be {says}, got {shown(raw[key])}")


def _beside(name: str, value: Any) -> dict[str, Any]:
    """Fields that a value needs beside it to be valid, so that only the value itself can be refused."""
    if name == "min_tokens":
        return {"max_tokens": 2**31}
    if name == "num_beam_groups":
        return {"num_beams": value, "diversity_penalty": 1.0} if is_integer(value) and value > 1 else {}
    if name == "diversity_penalty":
        return {"num_beams": 2, "num_beam_groups": 2}
    return {}


def _are_words(value: Any) -> bool:
    return isinstance(value, list) and all(are_counts(word) and word for word in value)


@dataclass(frozen=True, slots=True)
class EndTokens:
    """A model's end tokens; `impossible` are ids that it names but are outside its vocabulary."""

    token_ids: frozenset[int]
    impossible: tuple[int, ...] = ()


def end_tokens(value: Any, vocab_size: int, place: str) -> EndTokens:
    """Reads `eos_token_id`.

    Raises:
        UsageError: it is neither a token id nor a list of them.
    """
    named = [] if value is None else value if isinstance(value, list) else [value]
    if not all(is_integer(token_id) for token_id in named):
        raise UsageError(f"{place}: eos_token_id must be a token id, a list of them or null, got {shown(value)}")
    possible = frozenset(token_id for token_id in named if 0 <= token_id < vocab_size)
    return EndTokens(possible, tuple(dict.fromkeys(each for each in named if each not in possible)))

"""What a run takes from a model before its weights are loaded: limits, end tokens and generation defaults."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from transformers import GenerationConfig

from pagedbatch.errors import UsageError
from pagedbatch.model.checkpoint import check_folder
from pagedbatch.model.config_check import is_integer
from pagedbatch.model.generation_defaults import (
    GENERATION_CONFIG,
    EndTokens,
    GenerationDefaults,
    check_generation_config,
    end_tokens,
    read_generation_defaults,
)
from pagedbatch.model.hf_config import load_config
from pagedbatch.model.library_errors import one_line_errors, quiet
from pagedbatch.model.model_config import ModelConfig, check_supported
from pagedbatch.model.model_files import ModelSource, find_model, shown


@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """`max_model_len` is the longest sequence in this run, in tokens; `remarks` are lines that the user should see."""

    config: ModelConfig
    eos_token_ids: frozenset[int]
    max_model_len: int
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)
    remarks: tuple[str, ...] = ()
    decoder_start_token_id: int | None = None
    """What the decoder of an encoder-decoder begins with; None: it is a decoder alone."""
    num_token_ids: int | None = None
    """Ids from here on are no tokens of the tokenizer: the vocabulary is padded. None: it is not known."""


def model_defaults(
    model: str,
    *,
    trust_remote_code: bool = False,
    ignore_adapter: bool = False,
    use_generation_config: bool = True,
    asked_model_len: int | None = None,
) -> ModelDefaults:
    """Reads the config files alone.

    Args:
        ignore_adapter: ignore an adapter beside the weights; otherwise it is an error.
        use_generation_config: False: no generation defaults, and the file is not checked; end tokens always count.
        asked_model_len: the longest sequence; None: that of the config.

    Raises:
        UsageError: there is no such model, its files are broken, or it is not supported.
    """
    source = find_model(model)
    hf_config = load_config(model, trust_remote_code=trust_remote_code)
    check_supported(hf_config)
    check_folder(source, ignore_adapter=ignore_adapter)
    config = ModelConfig.from_hf(hf_config)
    longest = config.context.max_model_len(asked_model_len)
    raw, place = _generation_config(source, hf_config)
    end = end_tokens(raw.get("eos_token_id"), config.vocab_size, place)
    if not end.token_ids:
        named = end_tokens(getattr(hf_config, "eos_token_id", None), config.vocab_size, source.config_place)
        end = EndTokens(named.token_ids, end.impossible or named.impossible)
    generation = GenerationDefaults()
    if use_generation_config:
        check_generation_config(raw, place)
        generation = read_generation_defaults(
            SimpleNamespace(**raw), longest, place, is_encoder_decoder=config.source is not None
        )
    remarks = tuple(_remarks(end, config, asked_model_len))
    start = None if config.source is None else _decoder_start(raw, hf_config, config.vocab_size, place)
    return ModelDefaults(config, end.token_ids, longest, generation, remarks, start)


def _decoder_start(raw: dict[str, Any], hf_config: Any, vocab_size: int, place: str) -> int:
    """The token that `generate` begins with: the one named for it, else BOS.

    Raises:
        UsageError: there is none, or it is no token.
    """
    named = (raw.get(name, getattr(hf_config, name, None)) for name in ("decoder_start_token_id", "bos_token_id"))
    start = next((token_id for token_id in named if token_id is not None), None)
    if not is_integer(start) or not 0 <= start < vocab_size:
        raise UsageError(
            f"{place}: decoder_start_token_id must be a token id below {vocab_size}, got {shown(start)}: the decoder "
            "has nothing to begin with"
        )
    return start


def _generation_config(source: ModelSource, hf_config: Any) -> tuple[dict[str, Any], str]:
    """What generation_config.json says or, where there is none, the config; and which of the two it was."""
    raw = source.json_object(GENERATION_CONFIG)
    if raw is not None:
        return raw, str(source.file(GENERATION_CONFIG))
    with one_line_errors(f"model {source.name!r} can't be loaded: {source.config_place}"), quiet():
        from_config: dict[str, Any] = GenerationConfig.from_model_config(hf_config).to_dict()
    return from_config, source.config_place


def _remarks(end: EndTokens, config: ModelConfig, asked_model_len: int | None) -> Iterator[str]:
    if end.impossible:
        ids = ", ".join(map(str, end.impossible))
        yield f"the model's eos_token_id names {ids}, outside its vocabulary of {config.vocab_size}: left out"
    if asked_model_len is not None and asked_model_len > config.context.tokens:
        yield (
            f"--max-model-len {asked_model_len} is more than the {config.context.tokens} tokens of this model's "
            "config: what is beyond may be poor"
        )


def num_token_ids(tokenizer: Any, defaults: ModelDefaults) -> int:
    """One more than the last id that is a token, or ends outputs of the model. There may be holes before it."""
    vocab_size = defaults.config.vocab_size
    ends = (i for i in defaults.eos_token_ids if i < vocab_size)
    last: int = max((*tokenizer.get_vocab().values(), *ends), default=vocab_size - 1)
    return min(last + 1, vocab_size)

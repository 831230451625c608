"""Sources of encoder-decoders, and what their outputs begin with: end tokens, languages, target prefixes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from pagedbatch.errors import ParamError, RowError
from pagedbatch.params import GenerationParams
from pagedbatch.wording import short


@dataclass(frozen=True, slots=True)
class SourceLimits:
    """What an encoder-decoder adds to `ModelLimits`, which are its decoder's."""

    max_tokens: int
    vocab_size: int
    decoder_start_token_id: int
    padding_id: int | None = None  #: no source may hold it: positions would not count it


@dataclass(frozen=True, slots=True)
class Target:
    """What a decoder begins with, and the parameters that go with it."""

    token_ids: list[int]
    params: GenerationParams


class SourceEncoder:
    """Encodes what one row gives to an encoder-decoder with a Hugging Face tokenizer.

    Args:
        defaults: the model's generation defaults. A length among them counts the target prefix too, as in `generate`.
        asked: the names of parameters that were asked for, for the run.
    """

    def __init__(
        self, tokenizer: Any, limits: SourceLimits, *, defaults: Mapping[str, Any], asked: frozenset[str] = frozenset()
    ) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._defaults = defaults
        self._asked = asked
        self._special = frozenset(tokenizer.all_special_ids)
        #: Marian's models for several targets take the language as the first word of the source.
        self._prefixes = frozenset(getattr(tokenizer, "supported_language_codes", ()))

    @property
    def vocab_size(self) -> int:
        """Of the encoder; that of the decoder may be another."""
        return self._limits.vocab_size

    @staticmethod
    def check_token_ids(name: str, token_ids: list[int], size: int) -> None:
        """
        Raises:
            RowError: one is outside a vocabulary of `size`.
        """
        for token_id in token_ids:
            if not 0 <= token_id < size:
                raise RowError(f"{name}: {token_id} is no token id of this model, whose vocabulary has {size}")

    def check(self, params: GenerationParams) -> None:
        """
        Raises:
            ParamError: the tokenizer does not know a language.
        """
        self._source_language(params)
        self._target_language(params)

    def source(self, encode: Callable[[], list[int]], params: GenerationParams) -> list[int]:
        """A source's token ids, end token included.

        Args:
            encode: gives those of a text, once the tokenizer is set to the source's language.

        Raises:
            RowError: nothing of the text is a token.
        """
        language = self._source_language(params)
        if language is not None:
            self._tokenizer.src_lang = language
        token_ids = encode()
        if self._special.issuperset(token_ids):
            raise RowError("the source is empty: its text has no token of its own")
        return token_ids

    def prefixed(self, text: str, params: GenerationParams) -> str:
        """The text of a source, after the mark of its target language where the model takes one."""
        if params.target_lang is None or not self._prefixes:
            return text
        return f"{self._target_mark(params.target_lang)} {text}"

    def truncate(self, token_ids: list[int], params: GenerationParams) -> list[int]:
        """A source that is longer than the encoder takes, cut on the side that `params` name. An end token stays.

        Raises:
            RowError: it is too long, and not to be cut; or it is empty.
        """
        limit = self._limits.max_tokens
        if not token_ids:
            raise RowError("the source is empty: it has no token")
        if self._limits.padding_id in token_ids:
            raise RowError(f"the source holds the padding token, {self._limits.padding_id}: this model can't read it")
        if len(token_ids) <= limit:
            return token_ids
        if params.truncate_prompt == "error":
            raise RowError(
                f"the source has {len(token_ids)} tokens, and the model's limit is {limit} (--truncate-prompt cuts)"
            )
        ends = token_ids[-1:] if token_ids[-1] in self._special else []
        body = token_ids[: len(token_ids) - len(ends)]
        num_kept = limit - len(ends)
        return (body[:num_kept] if params.truncate_prompt == "right" else body[len(body) - num_kept :]) + ends

    def target(self, fields: Mapping[str, Any], params: GenerationParams, num_source_tokens: int) -> Target:
        """What the decoder begins with: its start token, the target language where a prefix follows it, the prefix.

        Raises:
            RowError: `decoder_prompt` is neither text nor token ids.
        """
        start, forced = self._limits.decoder_start_token_id, params.forced_bos_token_id
        language = self._target_language(params)
        if language is not None and self._begins_with_language:
            start = language
        elif language is not None:
            forced = language
        prefix = self._prefix(fields.get("decoder_prompt"))
        token_ids = [start, *prefix]
        if prefix and language is not None and forced == language != prefix[0]:
            token_ids = [start, forced, *prefix]
        params = self._without_prefix(params, fields, len(token_ids) - 1)
        if params.max_tokens_per_source_token is not None:
            most = ceil(params.max_tokens_per_source_token * num_source_tokens)
            params = replace(params, max_tokens=min(params.max_tokens, most), min_tokens=min(params.min_tokens, most))
        return Target(token_ids, replace(params, forced_bos_token_id=forced if len(token_ids) == 1 else None))

    def _without_prefix(self, params: GenerationParams, fields: Mapping[str, Any], length: int) -> GenerationParams:
        """Lengths that are the model's own defaults count the target prefix, as in `generate`."""
        own = {
            name: max(0, getattr(params, name) - length)
            for name in ("max_tokens", "min_tokens")
            if name in self._defaults and name not in self._asked and fields.get(name) is None
        }
        return replace(params, **own) if length and own else params

    def _prefix(self, value: Any) -> list[int]:
        if value is None:
            return []
        if isinstance(value, str):
            token_ids: list[int] = self._tokenizer(text_target=value, add_special_tokens=False)["input_ids"]
            return token_ids
        if not isinstance(value, list) or not all(type(token_id) is int for token_id in value):
            raise RowError(f"decoder_prompt must be text or a list of token ids, got {short(value)}")
        return list(value)

    @property
    def _begins_with_language(self) -> bool:
        """The first mBART's decoder starts with the language; that of its successors is forced to write it."""
        return type(self._tokenizer).__name__.startswith("MBartTokenizer")

    def _source_language(self, params: GenerationParams) -> str | None:
        language = params.source_lang
        if language is None:
            return None
        if not hasattr(self._tokenizer, "src_lang"):
            raise ParamError(f"source_lang {language!r}: this model's tokenizer has no source languages")
        self._language_id("source_lang", language)
        return language

    def _target_language(self, params: GenerationParams) -> int | None:
        """The token of the target language, for models whose outputs begin with it."""
        language = params.target_lang
        if language is None:
            return None
        if self._prefixes:
            self._target_mark(language)
            return None
        if not hasattr(self._tokenizer, "src_lang"):
            raise ParamError(f"target_lang {language!r}: this model's tokenizer has no target languages")
        return self._language_id("target_lang", language)

    def _target_mark(self, language: str) -> str:
        mark = f">>{language.strip('<>')}<<"
        if mark not in self._prefixes:
            known = ", ".join(sorted(each.strip("<>") for each in self._prefixes)[:8])
            raise ParamError(f"target_lang {language!r}: this model's tokenizer has no such language; it has {known}")
        return mark

    def _language_id(self, name: str, language: str) -> int:
        vocabulary = self._tokenizer.get_added_vocab()
        for token in (language, f"__{language}__"):  # M2M100 writes them so
            if token in vocabulary:
                return int(vocabulary[token])
        raise ParamError(f"{name} {language!r}: this model's tokenizer has no such language")

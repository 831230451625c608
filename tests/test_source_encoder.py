"""Sources and target prefixes: languages of three kinds of tokenizers, truncation, lengths that count the prefix."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pagedbatch.errors import ParamError, RowError
from pagedbatch.input.source_encoder import SourceEncoder, SourceLimits
from pagedbatch.params import GenerationParams

LIMITS = SourceLimits(max_tokens=8, vocab_size=100, decoder_start_token_id=2)
EOS = 3


class Letters:
    """A token a letter, 10 for `a`, and an end token; one is needed, not a language."""

    all_special_ids = (0, 2, EOS, 90, 91)

    def __call__(self, text: str = "", *, text_target: str | None = None, add_special_tokens: bool = True) -> Any:
        ids = [ord(letter) - 87 for letter in (text if text_target is None else text_target)]
        return {"input_ids": ids + [EOS] * add_special_tokens}

    def get_added_vocab(self) -> dict[str, int]:
        return {"</s>": EOS}


class Nllb(Letters):
    src_lang = "eng"

    def get_added_vocab(self) -> dict[str, int]:
        return {"eng": 90, "fra": 91}


class M2M100(Nllb):
    def get_added_vocab(self) -> dict[str, int]:
        return {"__eng__": 90, "__fra__": 91}


class MBartTokenizer(Nllb):
    """The first mBART's, by its name."""


class Marian(Letters):
    supported_language_codes = (">>fra<<", ">>deu<<")


def encoder(tokenizer: Any, limits: SourceLimits = LIMITS, **settings: Any) -> SourceEncoder:
    return SourceEncoder(tokenizer, limits, **{"defaults": {}, **settings})


@pytest.mark.parametrize("kind", [Nllb, M2M100])
def test_a_target_language_is_forced(kind: type[Letters]) -> None:
    found = encoder(kind()).target({}, GenerationParams(target_lang="fra"), 5)
    assert (found.token_ids, found.params.forced_bos_token_id) == ([2], 91)
    found = encoder(kind()).target({"decoder_prompt": "b"}, GenerationParams(target_lang="fra"), 5)
    assert (found.token_ids, found.params.forced_bos_token_id) == ([2, 91, 11], None)
    found = encoder(kind()).target({"decoder_prompt": [91, 11]}, GenerationParams(target_lang="fra"), 5)
    assert found.token_ids == [2, 91, 11]


def test_the_first_mbart_starts_with_the_language() -> None:
    found = encoder(MBartTokenizer()).target({}, GenerationParams(target_lang="fra"), 5)
    assert (found.token_ids, found.params.forced_bos_token_id) == ([91], None)


def test_marians_language_is_a_word_of_the_source() -> None:
    sources, params = encoder(Marian()), GenerationParams(target_lang="fra")
    assert sources.prefixed("abc", params) == ">>fra<< abc"
    assert sources.target({}, params, 5).token_ids == [2]
    sources.check(replace(params, target_lang=">>deu<<"))
    with pytest.raises(ParamError, match=r"target_lang 'ita': .* it has deu, fra"):
        sources.check(replace(params, target_lang="ita"))


def test_the_source_language_is_set_before_the_text_is_encoded() -> None:
    tokenizer = Nllb()
    sources, seen = encoder(tokenizer), []

    def encode() -> list[int]:
        seen.append(tokenizer.src_lang)
        return [10, EOS]

    assert sources.source(encode, GenerationParams(source_lang="fra")) == [10, EOS]
    assert seen == ["fra"]
    with pytest.raises(RowError, match="no token of its own"):
        sources.source(lambda: [90, EOS], GenerationParams())


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        (Letters, GenerationParams(source_lang="eng"), "source_lang 'eng': .* has no source languages"),
        (Letters, GenerationParams(target_lang="eng"), "target_lang 'eng': .* has no target languages"),
        (Nllb, GenerationParams(source_lang="xx"), "source_lang 'xx': .* has no such language"),
        (Nllb, GenerationParams(target_lang="xx"), "target_lang 'xx': .* has no such language"),
    ],
)
def test_languages_that_there_are_not(kind: type[Letters], params: GenerationParams, message: str) -> None:
    with pytest.raises(ParamError, match=message):
        encoder(kind()).check(params)


def test_a_long_source_is_cut_but_for_its_end_token() -> None:
    sources, ids = encoder(Letters()), [*range(10, 20), EOS]
    assert sources.truncate(ids[-8:], GenerationParams()) == ids[-8:]
    assert sources.truncate(ids, GenerationParams(truncate_prompt="right")) == [*range(10, 17), EOS]
    assert sources.truncate(ids, GenerationParams(truncate_prompt="left")) == [*range(13, 20), EOS]
    assert sources.truncate(ids[:-1], GenerationParams(truncate_prompt="left")) == [*range(12, 20)]
    with pytest.raises(RowError, match="11 tokens, and the model's limit is 8"):
        sources.truncate(ids, GenerationParams())


def test_positions_that_do_not_count_padding() -> None:
    sources = encoder(Letters(), replace(LIMITS, padding_id=1))
    with pytest.raises(RowError, match="holds the padding token, 1"):
        sources.truncate([5, 1, EOS], GenerationParams())


def test_lengths_of_the_model_count_the_prefix_and_those_asked_for_do_not() -> None:
    params = GenerationParams(max_tokens=20, min_tokens=5)
    defaults = {"max_tokens": 20, "min_tokens": 5}
    fields = {"decoder_prompt": "abc"}

    def lengths(fields: dict[str, Any], **settings: Any) -> tuple[int, int]:
        found = encoder(Letters(), **settings).target(fields, params, 4).params
        return found.max_tokens, found.min_tokens

    assert lengths(fields, defaults=defaults) == (17, 2)
    assert lengths({}, defaults=defaults) == (20, 5)
    assert lengths(fields) == (20, 5)
    assert lengths(fields, defaults=defaults, asked=frozenset({"max_tokens"})) == (20, 2)
    assert lengths(fields | {"min_tokens": 5}, defaults=defaults) == (17, 5)


def test_a_limit_relative_to_the_source() -> None:
    params = GenerationParams(max_tokens=20, min_tokens=5, max_tokens_per_source_token=1.5)
    found = encoder(Letters()).target({}, params, 3).params
    assert (found.max_tokens, found.min_tokens) == (5, 5)
    assert encoder(Letters()).target({}, params, 30).params.max_tokens == 20


def test_what_is_no_target_prefix() -> None:
    for value in (5, [1.5], ["a"], [True]):
        with pytest.raises(RowError, match="decoder_prompt must be text or a list of token ids"):
            encoder(Letters()).target({"decoder_prompt": value}, GenerationParams(), 4)

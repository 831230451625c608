"""The bytes of tokens: joined over a text's tokens they are the text, for every kind of tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from pagedbatch.token_bytes import TokenBytes

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
CORPUS = [
    "hello world, how are you? don't 'say' it.",
    "  two  spaces",
    "größe naïve 中文字 日本語 😀👍🏽 e\u0301 x\u0302",
] * 4
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _wrapped(backend: Tokenizer, **settings: Any) -> Any:
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<bos>", "<eos>")])
    backend.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", **settings)


def byte_level() -> Any:
    """GPT-2, Llama 3, Qwen, SmolLM; converted tiktoken vocabularies."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet))
    return _wrapped(backend)


def _sentencepiece_vocabulary() -> dict[str, int]:
    pieces = [
        "<unk>",
        *BYTES,
        SPACE,
        *"abcdefghijklmnopqrstuvwxyz'.,",
        f"{SPACE}t",
        f"{SPACE}h",
        f"{SPACE}{SPACE}",
        "中",
    ]
    return {piece: i for i, piece in enumerate(pieces)}


def _byte_fallback_model() -> models.BPE:
    merges = [(SPACE, "t"), (SPACE, "h"), (SPACE, SPACE)]
    return models.BPE(
        vocab=_sentencepiece_vocabulary(), merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )


def llama() -> Any:
    """Llama 2, Mistral: a space before every text, which decoding takes away again."""
    backend = Tokenizer(_byte_fallback_model())
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _wrapped(backend)


def gemma() -> Any:
    """No space before the text, none taken away."""
    backend = Tokenizer(_byte_fallback_model())
    backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return _wrapped(backend)


def metaspace(scheme: str) -> Any:
    backend = Tokenizer(_byte_fallback_model())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme, split=False)
    backend.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(replacement=SPACE, prepend_scheme=scheme)]
    )
    return _wrapped(backend)


def word_piece(**settings: Any) -> Any:
    pieces = ["<unk>", *"abcdefghijklmnopqrstuvwxyz.,?!'é中", *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz")]
    backend = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=not settings)
    return _wrapped(backend, **settings)


def words() -> Any:
    """No decoder at all: tokens are joined with spaces."""
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "é": 2, "中": 3}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _wrapped(backend)


KINDS: dict[str, Callable[[], Any]] = {
    "byte-level": cache(byte_level),
    "llama": cache(llama),
    "gemma": cache(gemma),
    "metaspace-always": cache(lambda: metaspace("always")),
    "metaspace-first": cache(lambda: metaspace("first")),
    "metaspace-never": cache(lambda: metaspace("never")),
    "wordpiece": cache(word_piece),
    "wordpiece-cleaned": cache(lambda: word_piece(clean_up_tokenization_spaces=True)),
    "words": cache(words),
}
#: Texts of whole characters of one to four bytes, combining marks, marks of other vocabularies, special tokens.
TEXTS = st.lists(
    st.sampled_from(
        [*"aeht ' .,é中日\n", "  ", "😀", "👍🏽", "e\u0301", "Ω", SPACE, "##", "<0x41>", "<eos>", "<think>", "n't"]
    )
    | st.text(max_size=3).filter(lambda text: text.isprintable()),
    max_size=12,
).map("".join)


def joined(tokenizer: Any, token_ids: list[int], skip: bool) -> bytes:
    pieces = TokenBytes(tokenizer).of_output(token_ids, skip_special_tokens=skip)
    assert len(pieces) == len(token_ids)
    return b"".join(piece for piece, _ in pieces)


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS, skip=st.booleans())
@settings(max_examples=100)
def test_joined_they_are_the_text(kind: str, text: str, skip: bool) -> None:
    tokenizer = KINDS[kind]()
    token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert joined(tokenizer, token_ids, skip) == tokenizer.decode(token_ids, skip_special_tokens=skip).encode()


@given(text=TEXTS, skip=st.booleans())
@settings(max_examples=100)
def test_joined_they_are_the_text_of_a_trained_models_tokenizer(stories_path: Path, text: str, skip: bool) -> None:
    tokenizer = _loaded(stories_path)
    token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert joined(tokenizer, token_ids, skip) == tokenizer.decode(token_ids, skip_special_tokens=skip).encode()


@cache
def _loaded(path: Path) -> Any:
    from pagedbatch.model.tokenizer import load_tokenizer

    return load_tokenizer(str(path))


@pytest.mark.parametrize("kind", ["byte-level", "llama", "gemma"])
def test_tokens_that_are_part_of_a_character_have_their_own_bytes(kind: str) -> None:
    tokenizer = KINDS[kind]()
    token_ids = tokenizer("a👩", add_special_tokens=False)["input_ids"]
    token_bytes = TokenBytes(tokenizer)
    pieces = [piece for piece, _ in token_bytes.of_output(token_ids, skip_special_tokens=True)]
    assert len(pieces) > 2
    assert b"".join(pieces) == "a👩".encode()
    assert all(pieces[1:])


@pytest.mark.parametrize(("kind", "first"), [("llama", b"t"), ("metaspace-always", b"t"), ("gemma", b" t")])
def test_the_first_token_of_a_text_has_no_space_where_decoding_takes_it(kind: str, first: bytes) -> None:
    token_id = KINDS[kind]().convert_tokens_to_ids(f"{SPACE}t")
    token_bytes = TokenBytes(KINDS[kind]())
    assert token_bytes.shown(token_id, first=True, skip_special_tokens=True) == first
    assert token_bytes.shown(token_id, first=False, skip_special_tokens=True) == b" t"


def test_special_tokens_add_nothing_where_they_are_left_out() -> None:
    """And the token after one stands first, as the decoder has it."""
    tokenizer = KINDS["llama"]()
    token_ids = [tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids([f"{SPACE}t", "<think>", f"{SPACE}h"])]
    token_bytes = TokenBytes(tokenizer)
    left_out = token_bytes.of_output(token_ids, skip_special_tokens=True)
    assert left_out == [(b"", True), (b"t", True), (b"<think>", False), (b" h", False)]
    shown = token_bytes.of_output(token_ids, skip_special_tokens=False)
    assert [piece for piece, _ in shown] == [b"<eos>", b" t", b"<think>", b" h"]


def test_an_id_beyond_the_tokenizers_has_no_bytes() -> None:
    assert TokenBytes(KINDS["gemma"]()).literal(10_000, False) == b""


def test_a_decoder_that_is_not_known_gives_the_bytes_of_the_tokens_text() -> None:
    backend = Tokenizer(models.BPE(vocab={"a</w>": 0, "b": 1}, merges=[]))
    backend.decoder = decoders.BPEDecoder(suffix="</w>")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert TokenBytes(tokenizer).literal(0, False) == tokenizer.decode([0]).encode() == b"a"


def test_tokenizers_without_a_backend() -> None:
    """Slow ones of byte-level BPE, of SentencePiece, and of tiktoken with code of their own."""

    def slow(token: Any, **attributes: Any) -> TokenBytes:
        return TokenBytes(
            SimpleNamespace(
                all_special_ids=[],
                added_tokens_decoder={},
                convert_ids_to_tokens=lambda token_id: token,
                decode=lambda token_ids, skip_special_tokens: "\N{REPLACEMENT CHARACTER}",
                **attributes,
            )
        )

    assert slow("Ġð", byte_decoder={"Ġ": 32}).literal(0, False) == b" \xf0"
    assert slow("<0xF0>", sp_model=object()).literal(0, False) == b"\xf0"
    assert slow(f"{SPACE}a", sp_model=object()).literal(0, True) == b"a"
    assert slow(b"\xf0\x9f").literal(0, False) == b"\xf0\x9f"
    assert slow("?").literal(0, False) == b"\xef\xbf\xbd"

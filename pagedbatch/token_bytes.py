"""The bytes that a token adds to a text, also where it is only part of a character. Knows a Hugging Face tokenizer.

They are read off the tokenizer's decoder, step by step, and not off its class: byte-level BPE (GPT-2's table of bytes,
which tokenizers converted from tiktoken use too), SentencePiece with byte fallback (`<0xF0>`), Metaspace, WordPiece.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, lru_cache
from typing import Any

#: A step of a decoder: what becomes of a token's bytes; the second argument says whether it is the text's first token.
_Step = Callable[[bytes, bool], bytes]

_BYTE_TOKEN = re.compile(rb"<0x([0-9A-Fa-f]{2})>")
#: What slow SentencePiece tokenizers do, in the words of the fast ones.
_SENTENCEPIECE: list[Mapping[str, Any]] = [
    {"type": "Replace", "pattern": {"String": "\N{LOWER ONE EIGHTH BLOCK}"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
]
_NO_DECODER: list[Mapping[str, Any]] = [{"type": "Join"}]
#: What a WordPiece decoder with `cleanup` changes in each token (tokenizers, decoders/wordpiece.rs).
_CLEANUP = (
    (b" .", b"."), (b" ?", b"?"), (b" !", b"!"), (b" ,", b","), (b" ' ", b"'"), (b" n't", b"n't"), (b" 'm", b"'m"),
    (b" do not", b" don't"), (b" 's", b"'s"), (b" 've", b"'ve"), (b" 're", b"'re"),
)  # fmt: skip


class TokenBytes:
    """The bytes of tokens: joined over an output they are its text in UTF-8, as far as they are valid UTF-8.

    Where the tokenizer decodes in a way that isn't known here, a token's bytes are those of its text alone.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._steps = _steps_of(tokenizer)
        self._cleans_up = _cleans_up(tokenizer)
        self.literal = lru_cache(maxsize=1 << 17)(self._literal)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The tokens that a text can leave out."""
        added: Mapping[int, Any] = self._tokenizer.added_tokens_decoder
        return frozenset((*self._tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)))

    def shown(self, token_id: int, *, first: bool, skip_special_tokens: bool) -> bytes:
        """What a token adds to a text, whose `first` one it is or not: nothing where special tokens are left out."""
        return b"" if skip_special_tokens and token_id in self.special_ids else self.literal(token_id, first)

    def of_output(self, token_ids: list[int], *, skip_special_tokens: bool) -> list[tuple[bytes, bool]]:
        """What each token of an output adds to its text, and whether it is the first."""
        pieces: list[tuple[bytes, bool]] = []
        first = True
        for token_id in token_ids:
            pieces.append((self.shown(token_id, first=first, skip_special_tokens=skip_special_tokens), first))
            first = first and skip_special_tokens and token_id in self.special_ids
        if not self._cleans_up:
            return pieces
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        fitted = _without_lost_spaces([piece for piece, _ in pieces], text.encode(errors="replace"))
        return [(piece, is_first) for piece, (_, is_first) in zip(fitted, pieces, strict=True)]

    def _literal(self, token_id: int, first: bool) -> bytes:
        """A token's bytes, special or not; `first`: nothing is before it in the text."""
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:  # an id beyond the tokenizer's
            return b""
        if isinstance(token, bytes):  # tokenizers of their own code, around tiktoken
            return token
        if self._steps is None:
            text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
            return text.encode(errors="replace")
        data: bytes = token.encode(errors="replace")
        for step in self._steps:
            data = step(data, first)
        return data


def _steps_of(tokenizer: Any) -> list[_Step] | None:
    """The steps of a tokenizer's decoder; None where one of them isn't known."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        decoder = backend.decoder
        described = _NO_DECODER if decoder is None else list(_flat(json.loads(decoder.__getstate__())))
    elif isinstance(getattr(tokenizer, "byte_decoder", None), Mapping):
        described = [{"type": "ByteLevel"}]
    elif hasattr(tokenizer, "sp_model"):
        described = _SENTENCEPIECE
    else:
        return None
    steps, is_fused = [], False
    for description in described:
        if description["type"] == "Fuse":
            is_fused = True
            continue
        step = _step(description, is_fused)
        if step is None:
            return None
        steps.append(step)
    return steps


def _flat(decoder: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if decoder["type"] == "Sequence":
        for part in decoder["decoders"]:
            yield from _flat(part)
    else:
        yield decoder


def _step(described: Mapping[str, Any], is_fused: bool) -> _Step | None:
    """One decoder of the tokenizers library, for a single token. `is_fused`: those before it joined the tokens."""
    match described:
        case {"type": "ByteLevel"}:
            return lambda data, _: _byte_level(data)
        case {"type": "ByteFallback"}:
            return lambda data, _: _byte_fallback(data)
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return lambda data, _: data.replace(old.encode(), new.encode())
        case {"type": "Strip", "content": str(content), "start": int(start), "stop": 0}:
            stripped = content.encode()
            return lambda data, first: _strip(data, stripped, start) if first or not is_fused else data
        case {"type": "Metaspace", "replacement": str(mark), "prepend_scheme": str(scheme)}:
            drops = scheme != "never"
            return lambda data, first: data.replace(mark.encode(), b"" if first and drops else b" ")
        case {"type": "WordPiece", "prefix": str(prefix), "cleanup": bool(cleanup)}:
            return lambda data, first: _word_piece(data, first, prefix.encode(), cleanup)
        case {"type": "Join"}:
            return lambda data, first: data if first else b" " + data
    return None


def _byte_level(data: bytes) -> bytes:
    """A token of visible characters that stand for bytes; one that holds any other stands for itself."""
    table = _bytes_by_character()
    numbers = [table.get(character) for character in data.decode()]
    known = [number for number in numbers if number is not None]
    return bytes(known) if len(known) == len(numbers) else data


@lru_cache(maxsize=1)
def _bytes_by_character() -> dict[str, int]:
    """GPT-2's table: printable bytes stand for themselves, the others for the characters from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _byte_fallback(data: bytes) -> bytes:
    match = _BYTE_TOKEN.fullmatch(data)
    return bytes([int(match[1], 16)]) if match else data


def _strip(data: bytes, content: bytes, most: int) -> bytes:
    for _ in range(most):
        data = data.removeprefix(content)
    return data


def _word_piece(data: bytes, first: bool, prefix: bytes, cleanup: bool) -> bytes:
    if not first:
        data = data[len(prefix) :] if data.startswith(prefix) else b" " + data
    for old, new in _CLEANUP if cleanup else ():
        data = data.replace(old, new)
    return data


def _cleans_up(tokenizer: Any) -> bool:
    """Whether transformers takes spaces out of what the decoder gave; it spares BPE, but when it is told not to."""
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return False
    backend = getattr(tokenizer, "backend_tokenizer", None)
    is_bpe = backend is not None and type(backend.model).__name__ == "BPE"
    return not is_bpe or bool(
        getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
    )


def _without_lost_spaces(pieces: list[bytes], text: bytes) -> list[bytes]:
    """The pieces of a text from which some spaces were taken."""
    fitted, at = [], 0
    for piece in pieces:
        kept = bytearray()
        for byte in piece:
            if byte != ord(" ") or text[at : at + 1] == b" ":
                kept.append(byte)
                at += 1
        fitted.append(bytes(kept))
    return fitted

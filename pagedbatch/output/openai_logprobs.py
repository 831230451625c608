"""Logprobs of a plain record in the two formats of OpenAI's API."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

#: An entry of a plain record's `logprobs`, with its own `top_logprobs` where it is that of an output's token.
_Entry = Mapping[str, Any]

#: Bytes that stand for themselves in the name of a token that is no text: printable ASCII, as OpenAI writes them.
_PLAIN = frozenset(range(0x20, 0x7F)) - {ord("\\")}


def chat_logprobs(entries: Sequence[_Entry]) -> dict[str, Any]:
    """The format of chat completions: `bytes` beside each token, which joined are the text."""
    return {"content": [_chat_entry(entry) for entry in entries]}


def _chat_entry(entry: _Entry) -> dict[str, Any]:
    written = {"token": entry["token"], "logprob": entry["logprob"], "bytes": list(_bytes(entry))}
    if "top_logprobs" in entry:
        written["top_logprobs"] = [_chat_entry(other) for other in entry["top_logprobs"]]
    return written


def completion_logprobs(entries: Sequence[_Entry]) -> dict[str, Any]:
    r"""The format of completions: lists with one item per token.

    A token that is only part of a character is named by its bytes, as in `bytes:\xf0\x9f`. `top_logprobs` maps names to
    logprobs and holds the output's own token too; where names are equal, the output's token and then the likeliest has
    it, and the others are named by their ids, as in `token_id:123`. `text_offset` counts characters of the text before
    it was cut at a stop string; tokens that are part of a character have that character's.
    """
    return {
        "tokens": [_name(entry) for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [_named_logprobs(entry) for entry in entries],
        "text_offset": list(_offsets(entries)),
    }


def _named_logprobs(entry: _Entry) -> dict[str, float | None]:
    """The likeliest tokens by name, best first; the output's own token last where it isn't one of them."""
    own = _name(entry)
    named: dict[str, float | None] = {}
    for other in entry["top_logprobs"]:
        name = _name(other)
        is_own = other["token_id"] == entry["token_id"]
        if (name == own and not is_own) or name in named:
            name = f"token_id:{other['token_id']}"
        named[name] = other["logprob"]
    named.setdefault(own, entry["logprob"])
    return named


def _name(entry: _Entry) -> str:
    data = bytes(entry.get("bytes", ()))
    try:
        data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(chr(byte) if byte in _PLAIN else f"\\x{byte:02x}" for byte in data)
    return str(entry["token"])


def _offsets(entries: Sequence[_Entry]) -> Iterator[int]:
    """Where in the text each token, or the character that it is part of, begins."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    num_characters = 0
    for entry in entries:
        data = _bytes(entry)
        pending = decoder.getstate()[0]
        # Bytes that break off what is pending begin a character of their own.
        num_broken = len((pending + data[:1]).decode(errors="replace")) - 1 if pending and data else 0
        yield num_characters + num_broken
        num_characters += len(decoder.decode(data))


def _bytes(entry: _Entry) -> bytes:
    return bytes(entry["bytes"]) if "bytes" in entry else str(entry["token"]).encode()

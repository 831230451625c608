"""Logprobs in OpenAI's shapes: parts of a character keep their bytes, and equal texts all their entries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from workplace import run_rows

from pagedbatch.output.openai_logprobs import chat_logprobs, completion_logprobs


def _entry(token_id: int, data: bytes, logprob: float = -1.0, top: list[Any] | None = None) -> dict[str, Any]:
    """An entry of a plain record, of a token that adds `data` to the text."""
    text = data.decode(errors="replace")
    entry: dict[str, Any] = {"token_id": token_id, "token": text, "logprob": logprob}
    if text.encode() != data:
        entry["bytes"] = list(data)
    return entry if top is None else {**entry, "top_logprobs": top}


def _end_token() -> dict[str, Any]:
    return {"token_id": 2, "token": "<eos>", "logprob": -1.0, "bytes": [], "top_logprobs": []}


def test_bytes_of_a_chat_joined_are_its_text() -> None:
    entries = [_entry(i, bytes([byte]), top=[]) for i, byte in enumerate("né 😀".encode())] + [_end_token()]
    content = chat_logprobs(entries)["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == "né 😀"
    assert content[-1] == {"token": "<eos>", "logprob": -1.0, "bytes": [], "top_logprobs": []}


def test_parts_of_a_character_are_named_by_their_bytes() -> None:
    parts = [b"\xf0\x9f", b"\x98", b"\x80"]
    others = [_entry(10 + i, bytes([0xE0 + i]), -2.0 - i) for i in range(4)]
    entries = [_entry(i, part, top=[_entry(i, part), *others]) for i, part in enumerate(parts)]
    written = completion_logprobs(entries)
    assert written["tokens"] == [r"bytes:\xf0\x9f", r"bytes:\x98", r"bytes:\x80"]
    assert written["top_logprobs"][0] == {
        r"bytes:\xf0\x9f": -1.0, r"bytes:\xe0": -2.0, r"bytes:\xe1": -3.0, r"bytes:\xe2": -4.0, r"bytes:\xe3": -5.0
    }  # fmt: skip
    assert written["text_offset"] == [0, 0, 0]


def test_the_outputs_own_token_is_one_of_them() -> None:
    likelier = [_entry(5, b"a", -0.1), _entry(6, b"b", -0.2)]
    written = completion_logprobs([_entry(7, b"c", -3.0, likelier), _entry(6, b"b", -0.2, likelier), _end_token()])
    assert [list(named.items()) for named in written["top_logprobs"]] == [
        [("a", -0.1), ("b", -0.2), ("c", -3.0)],
        [("a", -0.1), ("b", -0.2)],
        [("<eos>", -1.0)],
    ]


def test_tokens_of_one_text_lose_no_entry() -> None:
    """The output's own has the text, whatever its rank; then the likeliest."""
    tops = [_entry(i, data, -float(i)) for i, data in enumerate([b"a", b"a", b"b", b"b", b"\xff", b"\xff"])]
    written = completion_logprobs([_entry(1, b"a", -1.0, tops)])
    assert written["top_logprobs"][0] == {
        "token_id:0": 0.0, "a": -1.0, "b": -2.0, "token_id:3": -3.0, r"bytes:\xff": -4.0, "token_id:5": -5.0
    }  # fmt: skip


@given(st.text(max_size=12), st.lists(st.integers(1, 4), min_size=60, max_size=60))
def test_offsets_are_where_a_tokens_character_begins(text: str, sizes: list[int]) -> None:
    """Whatever the tokens: cut the text's bytes anywhere."""
    data, begins = text.encode(errors="replace"), []
    pieces, at = [], 0
    for size in sizes:
        if at >= len(data):
            break
        begins.append(at)
        pieces.append(data[at : at + size])
        at += size
    first_bytes = [len(data.decode()[:i].encode()) for i in range(len(data.decode()) + 1)]
    expected = [max(i for i, first in enumerate(first_bytes) if first <= begin) for begin in begins]
    written = completion_logprobs([_entry(i, piece, top=[]) for i, piece in enumerate(pieces)])
    assert written["text_offset"] == expected


def test_bytes_that_make_no_character_count_as_their_mark() -> None:
    pieces = [b"a", b"\xf0\x9f", b"b", b"\xff", b"c"]  # "a?b?c"
    written = completion_logprobs([_entry(i, piece, top=[]) for i, piece in enumerate(pieces)])
    assert written["text_offset"] == [0, 1, 2, 3, 4]


def _demo_model() -> Path:
    import platformdirs

    path = platformdirs.user_cache_path("pagedbatch") / "models" / "SmolLM2-135M-Instruct"
    if not path.is_dir():
        pytest.skip("the demo model is not here: `make demo` fetches it")
    return path


@pytest.mark.parametrize("trained", [False, True])
def test_an_emoji_through_a_run(rand_model_path: Path, tmp_path: Path, trained: bool) -> None:
    """Cases 60 and 61: a text that tokens cut within its characters, asked for as chat, completion and plain row."""
    model, text = _demo_model() if trained else rand_model_path, "né 🦩 中"
    ask = {"max_tokens": 40, "allowed_outputs": [text]}
    chat = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 5, **ask}
    rows = [
        {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": chat},
        {
            "custom_id": "text",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": "a", "logprobs": 5, **ask},
        },
        {"id": "plain", "prompt": "a", "logprobs": 5, **ask},
        {"id": "shown", "prompt": "a", "logprobs": 0, "skip_special_tokens": False, **ask},
    ]
    chat, completion, plain, shown = run_rows(model, tmp_path, rows)

    (choice,) = chat["response"]["body"]["choices"]
    assert choice["message"]["content"] == text
    content = choice["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == text
    assert all(len(entry["top_logprobs"]) == 5 for entry in content)

    (choice,) = completion["response"]["body"]["choices"]
    logprobs = choice["logprobs"]
    assert {len(column) for column in logprobs.values()} == {len(content)}
    for name, logprob, named in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert named[name] == logprob
        assert len(named) in (5, 6)
    cut = (r"bytes: \xf0\x9f", r"bytes:\xf0")
    assert any(name.startswith(cut) for name in logprobs["tokens"])
    assert logprobs["text_offset"][0] == 0
    assert logprobs["text_offset"][-1] == len(text)
    begins = dict(zip(logprobs["text_offset"], logprobs["tokens"], strict=False))
    assert set(begins) <= set(range(len(text) + 1))

    entries = plain["outputs"][0]["logprobs"]
    pieces = [bytes(entry.get("bytes", entry["token"].encode())) for entry in entries]
    assert b"".join(pieces).decode() == text
    assert all("\N{REPLACEMENT CHARACTER}" in entry["token"] for entry in entries if entry.get("bytes"))

    (output,) = shown["outputs"]
    pieces = [bytes(entry.get("bytes", entry["token"].encode())) for entry in output["logprobs"]]
    assert b"".join(pieces).decode() == output["text"] != text


def test_what_a_stop_string_cuts_off_keeps_its_entries(rand_model_path: Path, tmp_path: Path) -> None:
    """Lists stay in step with the tokens that were generated; offsets go on past the end of the text."""
    body = {"prompt": "a", "logprobs": 1, "max_tokens": 6, "allowed_token_ids": [10, 11, 12]}
    (free,) = run_rows(rand_model_path, tmp_path, [_completions_row(body)])
    text = free["response"]["body"]["choices"][0]["text"]
    assert len(text) == 6
    (cut,) = run_rows(rand_model_path, tmp_path, [_completions_row({**body, "stop": text[1:3]})])
    (choice,) = cut["response"]["body"]["choices"]
    first = text.index(text[1:3])
    assert choice["text"] == text[:first]
    assert choice["logprobs"]["text_offset"] == list(range(first + 2))
    assert "".join(choice["logprobs"]["tokens"]) == text[: first + 2]


def _completions_row(body: dict[str, Any]) -> dict[str, Any]:
    return {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}

"""OpenAI batch rows: read and answered in their own shape, each alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagedbatch.errors import RowError
from pagedbatch.job.job import Ui, run_job
from pagedbatch.job.openai_batch import CHAT_URL, COMPLETIONS_URL, check_model, plain_fields
from pagedbatch.job.settings import merge

HI = [{"role": "user", "content": "hi"}]


def _row(custom_id: Any, url: str, body: Any, method: str = "POST") -> dict[str, Any]:
    return {"custom_id": custom_id, "method": method, "url": url, "body": body}


def test_a_body_becomes_a_plain_row() -> None:
    body = {
        "model": "gpt-x",
        "messages": HI,
        "max_completion_tokens": 9,
        "max_tokens": None,
        "n": 2,
        "stop": "x",
        "logprobs": True,
        "top_logprobs": 3,
        "top_k": 5,
        "stream": False,
        "response_format": {"type": "text"},
        "tools": [],
    }
    assert plain_fields(_row("a", CHAT_URL, body)) == {
        "messages": HI,
        "max_tokens": 9,
        "n": 2,
        "stop": "x",
        "logprobs": 3,
        "top_k": 5,
    }
    assert plain_fields(_row("a", CHAT_URL, {"messages": HI, "logprobs": True}))["logprobs"] == 0
    any_object = {"messages": HI, "response_format": {"type": "json_object"}}
    assert plain_fields(_row("a", CHAT_URL, any_object))["json_schema"] == {"type": "object"}
    assert plain_fields(_row("a", COMPLETIONS_URL, {"prompt": [5, 6], "logprobs": 2})) == {
        "prompt_token_ids": [5, 6],
        "logprobs": 2,
    }


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (_row("a", "/v1/embeddings", {"input": "x"}), "url '/v1/embeddings' is not answered here"),
        (_row("a", CHAT_URL, {"messages": HI}, method="GET"), "method must be 'POST', got 'GET'"),
        (_row("a", CHAT_URL, "text"), "body must be an object, got 'text'"),
        ({"custom_id": "a", "url": CHAT_URL}, "body must be an object, got None"),
        (_row("a", CHAT_URL, {"messages": HI, "stream": True}), "body.stream = True is not supported"),
        (_row("a", CHAT_URL, {"messages": HI, "tools": ["x"]}), "body.tools must be a list of objects, got ['x']"),
        (_row("a", CHAT_URL, {"messages": HI, "response_format": {"type": "json_schema"}}), "body.response_format"),
        (_row("a", CHAT_URL, {"messages": HI, "logprobs": 2}), "body.logprobs must be true or false"),
        (_row("a", CHAT_URL, {"prompt": "x"}), "body has no messages"),
        (_row("a", COMPLETIONS_URL, {"messages": HI}), "body has no prompt"),
    ],
)
def test_what_cannot_be_had_is_refused(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowError) as refused:
        plain_fields(row)
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("served", "asked", "good"),
    [
        (None, None, True),
        (None, "M", True),
        (None, "path/M", True),
        (None, "gpt-x", False),
        ("gpt-x", "gpt-x", True),
        ("gpt-x", "M", False),
        (None, 5, False),
    ],
)
def test_a_row_for_another_model_is_refused(served: str | None, asked: Any, good: bool) -> None:
    settings = merge({"input": "i", "model": "path/M", "output": "o", "served_model_name": served}, {})
    row = _row("a", CHAT_URL, {"messages": HI, "model": asked})
    if good:
        check_model(row, settings.model_names)
    else:
        with pytest.raises(RowError, match=f"body.model is {asked!r}, which is not served here"):
            check_model(row, settings.model_names)


def test_rows_are_answered_in_their_own_shape(tmp_path: Path, rand_model_path: Path) -> None:
    rows = [
        _row("chat", CHAT_URL, {"messages": HI, "n": 2, "temperature": 1, "logprobs": True, "top_logprobs": 1}),
        _row("text", COMPLETIONS_URL, {"prompt": "hi", "logprobs": 2}),
        _row("embed", "/v1/embeddings", {"input": "x"}),
        {"method": "POST", "url": CHAT_URL, "body": {"messages": HI}},
        {"custom_id": "bare"},
        _row("stream", CHAT_URL, {"messages": HI, "stream": True}),
        _row("foreign", CHAT_URL, {"messages": HI, "model": "gpt-x"}),
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    plain = [{"id": "chat", "messages": HI, "n": 2, "temperature": 1}, {"id": "text", "prompt": "hi"}]
    (tmp_path / "plain.jsonl").write_text("\n".join(map(json.dumps, plain)))

    def run(name: str) -> tuple[int, list[Any]]:
        given = {
            "input": str(tmp_path / name),
            "output": str(tmp_path / f"out-{name}"),
            "model": str(rand_model_path),
            "num_blocks": 64,
            "max_tokens": 6,
            "dtype": "float32",
            "device": "cpu",
        }
        result = run_job(merge(given, {}), Ui(notice=print, open_view=lambda *_: _Silent()))
        return result.exit_code, [json.loads(line) for line in (tmp_path / f"out-{name}").read_text().splitlines()]

    exit_code, answers = run("in.jsonl")
    assert exit_code == 3
    _, records = run("plain.jsonl")
    assert [line["custom_id"] for line in answers] == ["chat", "text", "embed", None, "bare", "stream", "foreign"]
    assert [line["response"]["status_code"] for line in answers] == [200, 200, 400, 400, 400, 400, 400]
    assert [line["error"] is None for line in answers] == [True, True, False, False, False, False, False]
    assert "custom_id must be" in answers[3]["error"]["message"]

    chat, text = (line["response"]["body"] for line in answers[:2])
    assert (chat["object"], text["object"]) == ("chat.completion", "text_completion")
    assert chat["model"] == text["model"] == str(rand_model_path)
    assert [choice["message"] for choice in chat["choices"]] == [
        {"role": "assistant", "content": output["text"]} for output in records[0]["outputs"]
    ]
    assert [choice["text"] for choice in text["choices"]] == [output["text"] for output in records[1]["outputs"]]
    assert chat["usage"]["completion_tokens"] == records[0]["usage"]["completion_tokens"]
    first_token = chat["choices"][0]["logprobs"]["content"][0]
    assert first_token.keys() == {"token", "logprob", "bytes", "top_logprobs"}
    assert len(first_token["top_logprobs"]) == 1
    assert {len(column) for column in text["choices"][0]["logprobs"].values()} == {6}


class _Silent:
    def __enter__(self) -> _Silent:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def update(self, *_: object) -> None:
        return None

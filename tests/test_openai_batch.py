"""OpenAI batch rows: read and answered in their own shape, each alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_job import SilentView

from pagedbatch.errors import RowError
from pagedbatch.input.openai_batch import (
    CHAT_URL,
    COMPLETIONS_URL,
    check_model,
    endpoint,
    is_batch_row,
    plain_fields,
)
from pagedbatch.run.job import run_job
from pagedbatch.settings import merge

HI = [{"role": "user", "content": "hi"}]


def _row(custom_id: Any, url: str, body: Any, method: str = "POST") -> dict[str, Any]:
    return {"custom_id": custom_id, "method": method, "url": url, "body": body}


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        (CHAT_URL, "chat"),
        (COMPLETIONS_URL, "completions"),
        ("/chat/completions", "chat"),
        ("/completions", "completions"),
        ("/deployments/gpt-4o/chat/completions", "chat"),
        ("/openai/deployments/gpt-4o/chat/completions?api-version=2024-10-21", "chat"),
        ("/openai/deployments/gpt-4o/completions?api-version=2024-10-21", "completions"),
        ("/openai/v1/chat/completions", "chat"),
        ("/deployments/chat/completions", "completions"),
        ("/deployments/chat/chat/completions", "chat"),
        ("https://api.openai.com/v1/chat/completions", "chat"),
        ("https://me.openai.azure.com/openai/deployments/gpt-4o/chat/completions?api-version=x", "chat"),
        ("http://localhost:8000/v1/completions/", "completions"),
        ("/v1/embeddings", None),
        ("/v1/responses", None),
        ("/v1/chat/completions/x", None),
        ("/v1/chatcompletions", None),
        ("chat/completions", None),
        ("https://chat/completions", "completions"),
        ("https://completions", None),
        ("//chat/completions", None),
        ("http://[", None),
        ("", None),
        (None, None),
        (5, None),
        ([CHAT_URL], None),
    ],
)
def test_what_a_url_asks_for(url: Any, kind: str | None) -> None:
    assert endpoint(url) == kind


@pytest.mark.parametrize(
    ("prompt", "plain"),
    [
        ("hi", {"prompt": "hi"}),
        (["hi"], {"prompt": "hi"}),
        ([5, 6], {"prompt_token_ids": [5, 6]}),
        ([[5, 6]], {"prompt_token_ids": [5, 6]}),
        ([5], {"prompt_token_ids": [5]}),
    ],
)
def test_prompts_in_lists(prompt: Any, plain: dict[str, Any]) -> None:
    assert plain_fields(_row("a", COMPLETIONS_URL, {"prompt": prompt})) == plain


def test_only_a_custom_id_or_a_body_of_fields_makes_a_batch_row() -> None:
    assert is_batch_row({"custom_id": "a"})
    assert is_batch_row({"url": CHAT_URL, "body": {}})
    assert not is_batch_row({"url": "https://example.org", "body": "The text of a page."})


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
        "modalities": ["text"],
        "parallel_tool_calls": True,
        "reasoning_effort": "low",
        "store": True,
    }
    assert plain_fields(_row("a", CHAT_URL, body)) == {
        "messages": HI,
        "max_tokens": 9,
        "n": 2,
        "stop": "x",
        "logprobs": 3,
        "top_k": 5,
        "chat_template_kwargs": {"reasoning_effort": "low"},
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
        (_row("a", CHAT_URL, {"messages": HI, "logprobs": 1}), "body.logprobs must be true or false"),
        (_row("a", CHAT_URL, {"messages": HI, "top_logprobs": 2}), "body.top_logprobs needs logprobs true"),
        (_row("a", CHAT_URL, {"messages": HI, "max_tokens": 1, "max_completion_tokens": 2}), "contradict each other"),
        (_row("a", CHAT_URL, {"messages": HI, "tool_choice": "required"}), "body.tool_choice = 'required' is not"),
        (_row("a", CHAT_URL, {"messages": HI, "functions": [{"name": "f"}]}), "is not supported: here there is tools"),
        (_row("a", CHAT_URL, {"messages": HI, "temprature": 0}) | {"temperature": 1}, "temperature stands beside body"),
        (_row("a", CHAT_URL, {"messages": HI, "temprature": 0.5}), "body.temprature = 0.5 is not supported: did you"),
        (
            _row("a", CHAT_URL, {"messages": HI, "modalities": ["audio"]}),
            "body.modalities = ['audio'] is not supported",
        ),
        (_row("a", CHAT_URL, {"messages": HI}, method=["POST"]), "method must be 'POST', got ['POST']"),
        (_row("a", COMPLETIONS_URL, {"prompt": ["a", "b"]}), "body.prompt holds 2 prompts: a row takes one"),
        (_row("a", COMPLETIONS_URL, {"prompt": "a", "suffix": "b"}), "body.suffix = 'b' is not supported"),
        (_row("a", COMPLETIONS_URL, {"prompt": "a", "echo": True}), "is not supported: here there is prompt_logprobs"),
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
        _row(
            "chat",
            "/openai/deployments/gpt-4o/chat/completions?api-version=2024-10-21",
            {"messages": HI, "n": 2, "temperature": 1, "logprobs": True, "top_logprobs": 1},
            method="post",
        ),
        _row("text", "/completions", {"prompt": "hi", "logprobs": 2}),
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
        result = run_job(merge(given, {}), lambda *_: SilentView())
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

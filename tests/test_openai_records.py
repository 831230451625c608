"""Records in the format of OpenAI's batch output: what the usage of a row says, and whose record a line is."""

from __future__ import annotations

from typing import Any

import pytest

from pagedbatch.output.openai_records import openai_record, row_of_openai_record
from pagedbatch.row_context import ReplyFormat

USAGE = {"prompt_tokens": 7, "completion_tokens": 5, "cached_tokens": 4}
ERROR = {"id": "a", "index": 3, "status": "error", "outputs": [], "usage": USAGE, "error": "line 4: no prompt"}


def body(reply: ReplyFormat, **usage: int) -> dict[str, Any]:
    output = {"index": 0, "text": "x", "token_ids": [1], "finish_reason": "stop", "logprobs": None}
    record = {"id": "a", "index": 3, "status": "ok", "outputs": [output], "usage": USAGE | usage, "error": None}
    found: dict[str, Any] = openai_record(record, reply, "M")["response"]["body"]
    return found


@pytest.mark.parametrize("reply", ["chat", "completion"])
def test_the_usage_has_what_the_plain_record_has(reply: ReplyFormat) -> None:
    plain = {
        "prompt_tokens": 7,
        "completion_tokens": 5,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    assert body(reply)["usage"] == plain
    assert body(reply, truncated_tokens=9)["usage"] == plain | {"truncated_tokens": 9}
    thinking = {"completion_tokens_details": {"reasoning_tokens": 2}}
    assert body(reply, reasoning_tokens=2)["usage"] == plain | thinking
    assert body(reply, reasoning_tokens=2, truncated_tokens=9)["usage"] == plain | thinking | {"truncated_tokens": 9}


@pytest.mark.parametrize("reply", ["chat", "completion"])
def test_a_line_tells_its_row(reply: ReplyFormat) -> None:
    assert row_of_openai_record(openai_record(ERROR, reply, "M")) == 3


@pytest.mark.parametrize(
    "line",
    [
        {},
        {"id": "batch_req_3"},
        {"id": 3, "custom_id": "a", "response": {}, "error": None},
        {"id": "batch_req_x", "custom_id": "a", "response": {}, "error": None},
        {"id": "3", "custom_id": "a", "response": {}, "error": None},
    ],
)
def test_other_lines_tell_none(line: dict[str, Any]) -> None:
    assert row_of_openai_record(line) is None

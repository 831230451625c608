"""Records in the format of OpenAI's batch output file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedbatch.output.openai_logprobs import chat_logprobs, completion_logprobs
from pagedbatch.row_context import ReplyFormat

_ID_PREFIX = "batch_req_"


def openai_record(record: Mapping[str, Any], reply: ReplyFormat, model: str) -> dict[str, Any]:
    """The plain record of a row as a line of OpenAI's output file. Its ids are made from the row number."""
    index, error = record["index"], record["error"]
    if error is not None:
        status, problem = 400, {"code": "invalid_request", "message": error}
        body: dict[str, Any] = {"error": {"message": error, "type": "invalid_request_error", "code": None}}
    else:
        status, problem = 200, None
        body = _body(record, reply)
        if "note" in record:
            body["note"] = record["note"]
        if "prompt_logprobs" in record:
            body["prompt_logprobs"] = record["prompt_logprobs"]
        usage = record["usage"]
        body |= {
            "created": 0,
            "model": model,
            "usage": {
                "prompt_tokens": usage["prompt_tokens"],
                "completion_tokens": usage["completion_tokens"],
                "total_tokens": usage["prompt_tokens"] + usage["completion_tokens"],
                "prompt_tokens_details": {"cached_tokens": usage["cached_tokens"]},
                **_optional_usage(usage),
            },
        }
    return {
        "id": f"{_ID_PREFIX}{index}",
        "custom_id": record["id"],
        "response": {"status_code": status, "request_id": f"row-{index}", "body": body},
        "error": problem,
    }


def row_of_openai_record(line: Mapping[str, Any]) -> int | None:
    """The row number in a line that `openai_record` made; None if it is another line."""
    own_id = line.get("id")
    if not isinstance(own_id, str) or not line.keys() >= {"custom_id", "response", "error"}:
        return None
    number = own_id.removeprefix(_ID_PREFIX)
    return int(number) if number != own_id and number.isdecimal() else None


def _body(record: Mapping[str, Any], reply: ReplyFormat) -> dict[str, Any]:
    prefix, kind = ("chatcmpl", "chat.completion") if reply == "chat" else ("cmpl", "text_completion")
    choices = [_choice(output, reply) for output in record["outputs"]]
    return {"id": f"{prefix}-{record['index']}", "object": kind, "choices": choices}


def _choice(output: Mapping[str, Any], reply: ReplyFormat) -> dict[str, Any]:
    # The thinking part has the name that other servers give it.
    reasoning = {} if output.get("reasoning") is None else {"reasoning_content": output["reasoning"]}
    if reply == "chat":
        text = {"message": {"role": "assistant", "content": output["text"], **reasoning}}
    else:
        text = {"text": output["text"], **reasoning}
    write = chat_logprobs if reply == "chat" else completion_logprobs
    return {
        "index": output["index"],
        **text,
        "logprobs": output["logprobs"] and write(output["logprobs"]),
        "finish_reason": output["finish_reason"],
    }


def _optional_usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "truncated_tokens" in usage:
        found["truncated_tokens"] = usage["truncated_tokens"]
    if "reasoning_tokens" in usage:
        found["completion_tokens_details"] = {"reasoning_tokens": usage["reasoning_tokens"]}
    return found

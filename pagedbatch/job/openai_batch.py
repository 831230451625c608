"""Rows of OpenAI's batch format: read into plain rows, and plain records answered in their shape.

Knows no tokenizer and no engine. What a body asks for and this engine does not have is the row's error, never ignored.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from pagedbatch.errors import RowError
from pagedbatch.job.messages import short
from pagedbatch.job.openai_logprobs import chat_logprobs, completion_logprobs
from pagedbatch.params import READERS

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"

_PASSED_ON = frozenset(READERS) - {"logprobs"} | {
    "messages", "prompt", "prompt_token_ids", "priority", "allowed_outputs", "json_schema", "regex", "grammar",
}  # fmt: skip
#: Of no consequence for an answer, or read below.
_HARMLESS = {"model", "user", "metadata", "store", "service_tier", "stream_options", "parallel_tool_calls"}
_READ_HERE = {"max_completion_tokens", "logprobs", "top_logprobs", "response_format"}
_ID_PREFIX = "batch_req_"
#: Values that ask for nothing.
_NOTHING: tuple[Any, ...] = (None, False, [], {}, {"type": "text"}, "none")


def is_batch_row(fields: Mapping[str, Any]) -> bool:
    """Whether a row is OpenAI's: only such rows have a `custom_id`, or a `url` with a `body`."""
    return "custom_id" in fields or ("url" in fields and "body" in fields)


def plain_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the plain row that asks for the same.

    Raises:
        RowError: another endpoint or method, or the body asks for what can't be had.
    """
    url, method, body = fields.get("url"), fields.get("method", "POST"), fields.get("body")
    if url not in (CHAT_URL, COMPLETIONS_URL):
        raise RowError(f"url {short(url)} is not answered here: only {CHAT_URL} and {COMPLETIONS_URL} are")
    if method != "POST":
        raise RowError(f"method must be 'POST', got {short(method)}")
    if not isinstance(body, Mapping):
        raise RowError(f"body must be an object, got {short(body)}")
    for name, value in body.items():
        if name not in _PASSED_ON | _HARMLESS | _READ_HERE and value not in _NOTHING:
            raise RowError(f"body.{name} = {short(value)} is not supported")
    plain = {name: body[name] for name in _PASSED_ON if body.get(name) is not None}
    if body.get("max_completion_tokens") is not None:
        plain["max_tokens"] = body["max_completion_tokens"]
    plain["logprobs"] = _chat_logprobs(body) if url == CHAT_URL else body.get("logprobs")
    schema = _response_schema(body.get("response_format"))
    if schema is not None:
        if "json_schema" in plain:
            raise RowError("body.response_format and body.json_schema are given: a row takes one of them")
        plain["json_schema"] = schema
    needed = "messages" if url == CHAT_URL else "prompt"
    if needed not in plain and "prompt_token_ids" not in plain:
        raise RowError(f"body has no {needed}")
    if isinstance(plain.get("prompt"), list):
        plain["prompt_token_ids"] = plain.pop("prompt")
    return plain


def _response_schema(value: Any) -> Any:
    """The JSON schema that a `response_format` asks for; None where it asks for text."""
    if value in _NOTHING:
        return None
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "json_object":
        return {"type": "object"}
    described = value.get("json_schema") if kind == "json_schema" else None
    if isinstance(described, Mapping) and described.get("schema") is not None:
        return described["schema"]
    raise RowError(f"body.response_format = {short(value)} is not supported")


def check_model(fields: Mapping[str, Any], names: Container[str]) -> None:
    """Refuses a row that asks for a model other than the one that runs here under `names`.

    Raises:
        RowError: it does.
    """
    body = fields.get("body")
    asked = body.get("model") if isinstance(body, Mapping) else None
    if asked is not None and (not isinstance(asked, str) or asked not in names):
        raise RowError(f"body.model is {short(asked)}, which is not served here (--served-model-name gives it a name)")


def _chat_logprobs(body: Mapping[str, Any]) -> Any:
    """Chat says with a boolean whether, and with a number how many."""
    wanted, top = body.get("logprobs"), body.get("top_logprobs")
    if wanted not in (None, True, False):
        raise RowError(f"body.logprobs must be true or false for chat, got {short(wanted)}")
    return (0 if top is None else top) if wanted else None


def answer(record: Mapping[str, Any], url: Any, model: str) -> dict[str, Any]:
    """The plain record of a row as a line of OpenAI's output file. Its ids are made from the row number, not drawn."""
    index, error = record["index"], record["error"]
    if error is not None:
        status, problem = 400, {"code": "invalid_request", "message": error}
        body: dict[str, Any] = {"error": {"message": error, "type": "invalid_request_error", "code": None}}
    else:
        status, problem = 200, None
        body = _chat_body(record) if url == CHAT_URL else _completion_body(record)
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
                **{name: usage[name] for name in ("truncated_tokens",) if name in usage},
                **_token_details(usage),
            },
        }
    return {
        "id": f"{_ID_PREFIX}{index}",
        "custom_id": record["id"],
        "response": {"status_code": status, "request_id": f"row-{index}", "body": body},
        "error": problem,
    }


def answered_row(line: Mapping[str, Any]) -> int | None:
    """The row number in a line that `answer` made; None if it made no such line."""
    own_id = line.get("id")
    if not isinstance(own_id, str) or not line.keys() >= {"custom_id", "response", "error"}:
        return None
    number = own_id.removeprefix(_ID_PREFIX)
    return int(number) if number != own_id and number.isdecimal() else None


def _chat_body(record: Mapping[str, Any]) -> dict[str, Any]:
    choices = [
        {
            "index": output["index"],
            "message": {"role": "assistant", "content": output["text"], **_reasoning(output)},
            "logprobs": output["logprobs"] and chat_logprobs(output["logprobs"]),
            "finish_reason": output["finish_reason"],
        }
        for output in record["outputs"]
    ]
    return {"id": f"chatcmpl-{record['index']}", "object": "chat.completion", "choices": choices}


def _reasoning(output: Mapping[str, Any]) -> dict[str, Any]:
    """The thinking part, under the name that other servers give it."""
    return {"reasoning_content": output["reasoning"]} if output.get("reasoning") is not None else {}


def _token_details(usage: Mapping[str, Any]) -> dict[str, Any]:
    if "reasoning_tokens" not in usage:
        return {}
    return {"completion_tokens_details": {"reasoning_tokens": usage["reasoning_tokens"]}}


def _completion_body(record: Mapping[str, Any]) -> dict[str, Any]:
    choices = [
        {
            "index": output["index"],
            "text": output["text"],
            **_reasoning(output),
            "logprobs": output["logprobs"] and completion_logprobs(output["logprobs"]),
            "finish_reason": output["finish_reason"],
        }
        for output in record["outputs"]
    ]
    return {"id": f"cmpl-{record['index']}", "object": "text_completion", "choices": choices}

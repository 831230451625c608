"""Rows of OpenAI's batch format: read into plain rows, and plain records answered in their shape.

Knows no tokenizer and no engine. What a body asks for and this engine does not have is the row's error, never ignored.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from typing import Any, Literal

from pagedbatch.errors import RowError
from pagedbatch.input.fields.field_table import OPTIONS, SYNONYMS
from pagedbatch.input.fields.row_fields import read_fields
from pagedbatch.output.openai_logprobs import chat_logprobs, completion_logprobs
from pagedbatch.wording import short

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"

#: What a url asks for, whoever's server and deployment it names.
Endpoint = Literal["chat", "completions"]

_ID_PREFIX = "batch_req_"
_SCHEME_AND_HOST = re.compile(r"https?://[^/?#\s]+(?=/)", re.IGNORECASE)
_PATH = re.compile(r"(?:/[^/?#\s]+)+/?")


def is_batch_row(fields: Mapping[str, Any]) -> bool:
    """Whether a row is OpenAI's: only such rows have a `custom_id`, or an object as `body` beside a `url`."""
    return "custom_id" in fields or ("url" in fields and isinstance(fields.get("body"), Mapping))


def endpoint(url: Any) -> Endpoint | None:
    """What a url asks for, with or without a host, a deployment as Azure has them, and a query; None: neither."""
    if not isinstance(url, str):
        return None
    path = _SCHEME_AND_HOST.sub("", url.strip(), count=1).partition("?")[0]
    if not _PATH.fullmatch(path):
        return None
    *before, last = path.strip("/").split("/")
    if last != "completions":
        return None
    is_chat = before[-1:] == ["chat"] and before[-2:-1] != ["deployments"]
    return "chat" if is_chat else "completions"


def plain_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the plain row that asks for the same, by our names alone.

    Raises:
        RowError: another endpoint or method, or the body asks for what can't be had.
    """
    url, method, body = fields.get("url"), fields.get("method"), fields.get("body")
    kind = endpoint(url)
    if kind is None:
        raise RowError(f"url {short(url)} is not answered here: only {CHAT_URL} and {COMPLETIONS_URL} are")
    if method is not None and (not isinstance(method, str) or method.upper() != "POST"):
        raise RowError(f"method must be 'POST', got {short(method)}")
    if not isinstance(body, Mapping):
        raise RowError(f"body must be an object, got {short(body)}")
    for name, value in fields.items():
        if value is not None and (name in OPTIONS or name in SYNONYMS):
            raise RowError(f"{name} stands beside body, where nothing reads it: put it into body")
    if kind == "chat" and not (body.get("logprobs") is None or isinstance(body["logprobs"], bool)):
        raise RowError(f"body.logprobs must be true or false for chat, got {short(body['logprobs'])}")
    plain = read_fields(body, strict=True, prefix="body.")
    needed = "messages" if kind == "chat" else "prompt"
    if needed not in plain and "prompt_token_ids" not in plain:
        raise RowError(f"body has no {needed}")
    if isinstance(plain.get("prompt"), list):
        plain |= _listed_prompt(plain.pop("prompt"))
    return plain


def _listed_prompt(value: list[Any]) -> dict[str, Any]:
    """A prompt in a list: token ids, or a list of the one prompt, a text or token ids again."""
    if len(value) == 1 and isinstance(value[0], str):
        return {"prompt": value[0]}
    if len(value) == 1 and isinstance(value[0], list):
        return {"prompt_token_ids": value[0]}
    if len(value) > 1 and all(isinstance(each, (str, list)) for each in value):
        raise RowError(f"body.prompt holds {len(value)} prompts: a row takes one")
    return {"prompt_token_ids": value}


def check_model(fields: Mapping[str, Any], names: Container[str]) -> None:
    """Refuses a row that asks for a model other than the one that runs here under `names`.

    Raises:
        RowError: it does.
    """
    body = fields.get("body")
    asked = body.get("model") if isinstance(body, Mapping) else None
    if asked is not None and (not isinstance(asked, str) or asked not in names):
        raise RowError(f"body.model is {short(asked)}, which is not served here (--served-model-name gives it a name)")


def answer(record: Mapping[str, Any], url: Any, model: str) -> dict[str, Any]:
    """The plain record of a row as a line of OpenAI's output file. Its ids are made from the row number, not drawn."""
    index, error = record["index"], record["error"]
    if error is not None:
        status, problem = 400, {"code": "invalid_request", "message": error}
        body: dict[str, Any] = {"error": {"message": error, "type": "invalid_request_error", "code": None}}
    else:
        status, problem = 200, None
        body = _chat_body(record) if endpoint(url) == "chat" else _completion_body(record)
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

"""Rows of OpenAI's batch format, read into plain rows.

What a body asks for and this engine does not have is the row's error; nothing is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from typing import Any, Literal

from pagedbatch.errors import RowError
from pagedbatch.input.fields.field_table import OPTIONS, SYNONYMS
from pagedbatch.input.fields.row_fields import read_fields
from pagedbatch.row_context import ReplyFormat
from pagedbatch.wording import short

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"

#: What a url asks for, whoever's server and deployment it names.
Endpoint = Literal["chat", "completions"]

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


def reply_format(fields: Mapping[str, Any]) -> ReplyFormat:
    """The shape in which a row is to be answered."""
    if not is_batch_row(fields):
        return "plain"
    return "chat" if endpoint(fields.get("url")) == "chat" else "completion"


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

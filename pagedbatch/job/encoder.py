"""From text or messages to a prompt's token ids: who writes BOS, what a chat template makes, what is cut off.

Knows a Hugging Face tokenizer; no columns, no rows and no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pagedbatch.errors import ParamError, RowError, UsageError
from pagedbatch.job.long_text import check_fits, first_token_ids, is_long, last_token_ids
from pagedbatch.job.messages import first_line, short
from pagedbatch.job.preparation.steps import CHAT_TEMPLATE, TOKENIZING, step
from pagedbatch.job.rows import is_unicode
from pagedbatch.params import GenerationParams

Message = dict[str, Any]


class PromptEncoder:
    """Encodes prompts for a context of `limit` tokens.

    With `chat`, texts are wrapped in the chat template; `notice` takes one line, once.
    """

    def __init__(self, tokenizer: Any, *, limit: int, chat: bool, notice: Callable[[str], None]) -> None:
        if chat and not tokenizer.chat_template:
            raise UsageError("--chat: this model's tokenizer has no chat template; leave it out or choose a chat model")
        self._tokenizer = tokenizer
        self._limit = limit
        self._chat = chat
        self._notice = notice
        self._told_of_bos = False

    def encode_text(self, text: str, params: GenerationParams) -> list[int]:
        """BOS stands once, where the tokenizer wants one; `params.add_bos` forces one in front, or none.

        Raises:
            RowError: the text can't be encoded.
        """
        if not is_unicode(text):
            raise RowError("the prompt holds half of a surrogate pair, which is not Unicode text")
        if self._chat:
            return self.encode_messages([{"role": "user", "content": text}], params)
        bos = self._tokenizer.bos_token_id
        if params.add_bos is not None:
            token_ids = self._ids(text, params, add_special_tokens=False)
            if not params.add_bos:
                return token_ids
            if bos is None:
                raise ParamError("add_bos: this model's tokenizer has no BOS token")
            return [bos, *token_ids]
        token_ids = self._ids(text, params, add_special_tokens=True)
        if bos is None or token_ids[:2] != [bos, bos]:
            return token_ids
        if not self._told_of_bos:
            self._told_of_bos = True
            self._notice("a prompt begins with BOS itself: it gets no second one (--add-bos forces it)")
        return token_ids[1:]

    def encode_messages(self, messages: list[Message], params: GenerationParams) -> list[int]:
        """A chat through the model's template, which writes every special token itself.

        Raises:
            RowError: there is no template, or it refuses the messages.
        """
        if not self._tokenizer.chat_template:
            raise RowError("messages need a chat template, and this model's tokenizer has none: give a prompt")
        if params.system_to_user:
            messages = fold_system(messages)
        try:
            with step(CHAT_TEMPLATE):
                text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except MemoryError:
            raise
        except Exception as error:  # a template is the model's own code, and jinja raises what it likes
            raise RowError(f"the chat template refuses the messages: {first_line(error)}") from None
        return self._ids(text, params, add_special_tokens=False)

    def _ids(self, text: str, params: GenerationParams, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text; of a very long one as many as `truncate` needs."""

        def encode(part: str) -> list[int]:
            # verbose: how long a prompt may be is checked, and said, elsewhere
            ids: list[int] = self._tokenizer(part, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
            return ids

        with step(TOKENIZING):
            if not is_long(text, self._limit):
                return encode(text)
            if params.truncate_prompt == "error":
                return check_fits(text, self._limit, encode)
            if params.truncate_prompt == "right":
                return first_token_ids(text, self._limit, encode)
            last = last_token_ids(text, self._limit, encode)
            bos = self._tokenizer.bos_token_id
            begins_with_bos = bos is not None and encode(text[: self._limit])[:1] == [bos]
            return [bos, *last] if begins_with_bos and last[:1] != [bos] else last

    def truncate(self, token_ids: list[int], params: GenerationParams) -> list[int]:
        """A prompt that leaves no room for an output, cut on the side that `params` name; others as they are.

        What stays leaves room for `max_tokens`, but is at least half of the context. A BOS in front stays.
        """
        limit = self._limit
        fits = len(token_ids) + min(1, params.max_tokens) <= limit
        if fits or params.truncate_prompt == "error":
            return token_ids
        num_kept = limit - min(params.max_tokens, limit // 2)
        if params.truncate_prompt == "right":
            return token_ids[:num_kept]
        head = token_ids[:1] if token_ids[0] == self._tokenizer.bos_token_id else []
        return head + token_ids[len(token_ids) - num_kept + len(head) :]


def fold_system(messages: list[Message]) -> list[Message]:
    """The same chat without system messages: their text begins the first user message, with an empty line between."""
    system = [message["content"] or "" for message in messages if message["role"] == "system"]
    others = [message for message in messages if message["role"] != "system"]
    if not system:
        return messages
    for i, message in enumerate(others):
        if message["role"] == "user":
            others[i] = {**message, "content": "\n\n".join([*system, message["content"] or ""])}
            return others
    return [{"role": "user", "content": "\n\n".join(system)}, *others]


def checked_messages(value: Any) -> list[Message]:
    """A row's messages, the text parts of each joined.

    Raises:
        RowError: they are not messages, or hold more than text.
    """
    if not isinstance(value, list) or not value:
        raise RowError(f"messages must be a list of at least one message, got {short(value)}")
    return [_checked_message(i, message) for i, message in enumerate(value)]


def _checked_message(i: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RowError(f"messages[{i}] must be an object with a role and a content, got {short(message)}")
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_text_part(i, part) for part in content)
    if content is not None and not isinstance(content, str):
        raise RowError(f"messages[{i}].content must be text, got {short(content)}")
    if not is_unicode(f"{message['role']}{content}"):
        raise RowError(f"messages[{i}] holds half of a surrogate pair, which is not Unicode text")
    return {**message, "content": content}


def _text_part(i: int, part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise RowError(f"messages[{i}].content: only text parts can be read, got {short(part)}")

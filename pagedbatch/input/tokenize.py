"""From text or messages to a prompt's token ids: who writes BOS, what a chat template makes, what is cut off.

Knows a Hugging Face tokenizer; no columns, no rows and no engine.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from functools import cached_property, partial
from typing import Any

from pagedbatch.errors import ParamError, RowError, UsageError
from pagedbatch.input.chat.messages import Message
from pagedbatch.input.chat.options import ChatOptions
from pagedbatch.input.chat.template import ChatTemplate
from pagedbatch.input.long_text import check_fits, first_token_ids, is_long, last_token_ids
from pagedbatch.params import GenerationParams
from pagedbatch.preparation_steps import CHAT_TEMPLATE, TOKENIZING, step
from pagedbatch.readers import is_unicode

_log = logging.getLogger(__name__)


class PromptEncoder:
    """Encodes prompts for a context of `limit` tokens. With `chat`, texts are wrapped in the chat template.

    `eos_token_ids` are the model's. `keeps_end`: an end token that the tokenizer puts behind a text stays, as in the
    sources of encoder-decoders.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: ChatTemplate,
        *,
        limit: int,
        chat: bool,
        eos_token_ids: Collection[int] = (),
        keeps_end: bool = False,
    ) -> None:
        if chat and not template.exists:
            raise UsageError("--chat: this model's tokenizer has no chat template; leave it out or choose a chat model")
        self._tokenizer = tokenizer
        self._template = template
        self._limit = limit
        self._chat = chat
        self._eos_token_ids = frozenset(eos_token_ids)
        self._keeps_end = keeps_end
        self._told: set[str] = set()

    @property
    def wraps_texts(self) -> bool:
        """Whether a text is made a chat."""
        return self._chat

    def encode_text(self, text: str, params: GenerationParams, options: ChatOptions) -> list[int]:
        """BOS stands once, where the tokenizer wants one; `params.add_bos` forces one in front, or none.

        An end token that the tokenizer itself puts behind a text is left out: nothing is to follow it.

        Raises:
            RowError: the text can't be encoded.
        """
        if not is_unicode(text):
            raise RowError("the prompt holds half of a surrogate pair, which is not Unicode text")
        if self._chat:
            return self.encode_messages([{"role": "user", "content": text}], params, options)
        bos = self._tokenizer.bos_token_id
        if params.add_bos is not None:
            token_ids = self._ids(text, params, add_special_tokens=False)
            if not params.add_bos:
                return token_ids
            if bos is None:
                raise ParamError("add_bos: this model's tokenizer has no BOS token")
            return [bos, *token_ids]
        token_ids = self._ids(text, params, add_special_tokens=True)
        end = [] if self._keeps_end else self._appended_end
        if end and token_ids[-len(end) :] == end:
            token_ids = token_ids[: -len(end)]
            name = "".join(self._tokenizer.convert_ids_to_tokens(end))
            self._tell_once(f"the tokenizer puts the end token {name} behind every prompt: it is left out")
        if bos is None or token_ids[:2] != [bos, bos]:
            return token_ids
        self._tell_once("a prompt begins with BOS itself: it gets no second one (--add-bos forces it)")
        return token_ids[1:]

    def encode_messages(self, messages: list[Message], params: GenerationParams, options: ChatOptions) -> list[int]:
        """A chat through the model's template, which writes every special token itself.

        Raises:
            RowError: there is no template, it refuses the messages, or drops what was asked for.
        """
        with step(CHAT_TEMPLATE):
            text = self._template.render(messages, options, system_to_user=params.system_to_user)
        if not is_unicode(text):
            raise RowError("the chat holds half of a surrogate pair, which is not Unicode text")
        return self._ids(text, params, add_special_tokens=False)

    @cached_property
    def _appended_end(self) -> list[int]:
        """What the tokenizer puts behind a text, from its first end token on; empty where it appends none."""
        bare, whole = (self._encode("a", add_special_tokens=special) for special in (False, True))
        start = next((i for i in range(len(whole)) if bare and whole[i : i + len(bare)] == bare), None)
        appended = [] if start is None else whole[start + len(bare) :]
        if not appended:
            return []
        ends = self._eos_token_ids | {self._tokenizer.eos_token_id, self._tokenizer.sep_token_id}
        return appended if not ends.isdisjoint(appended) else []

    def _tell_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            _log.info(text)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # verbose: how long a prompt may be is checked, and said, elsewhere
        ids: list[int] = self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        return ids

    def _ids(self, text: str, params: GenerationParams, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text; of a very long one as many as `truncate` needs."""
        encode = partial(self._encode, add_special_tokens=add_special_tokens)
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

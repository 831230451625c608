"""Which tags mark a model's thinking part, whether a prompt has opened it, and how a budget closes it.

Knows a Hugging Face tokenizer; no rows and no engine, whose constraint it imports late.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pagedbatch.constraint import Constraint
from pagedbatch.errors import ParamError, RowError
from pagedbatch.params import GenerationParams
from pagedbatch.sequence import Thinking
from pagedbatch.token_bytes import TokenBytes

if TYPE_CHECKING:
    from pagedbatch.constraints.thinking import TagMatcher

#: Opening and closing tags, from the models' chat templates and cards.
KNOWN_TAGS = (
    ("<think>", "</think>"),  # DeepSeek-R1, Qwen3, QwQ, GLM-4.5, SmolLM3, MiniMax-M2, Nemotron, Hunyuan
    ("[THINK]", "[/THINK]"),  # Magistral
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A Reasoning
    ("◁think▷", "◁/think▷"),  # Kimi
)
#: What gpt_oss writes in place of tags: a channel for each message.
_CHANNEL = "<|channel|>"


@dataclass(frozen=True, slots=True)
class _Tags:
    opening: str
    closing: str


class ThinkingRules:
    """What is known of a model's thinking part. `eos_token_ids` are below `vocab_size`."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._bytes = TokenBytes(tokenizer)

    def check_budget(self, params: GenerationParams) -> None:
        """
        Raises:
            ParamError: a thinking budget is given, and can't be held.
        """
        if params.thinking_budget is None:
            return
        tags = self._tags
        if tags is None:
            template = "".join(_templates(self._tokenizer))
            reason = "neither its chat template nor its vocabulary has tags around one, such as <think> and </think>"
            if _CHANNEL in template or _CHANNEL in self._tokenizer.get_vocab():
                reason = "it thinks in channels, which no tag closes"
            raise ParamError(f"thinking_budget: this model marks no thinking part: {reason}")
        needed = {*self._matchers[0].token_ids, *self._matchers[1].token_ids}
        banned = {word[0] for word in params.bad_words_ids if len(word) == 1} & needed
        if banned or (params.allowed_token_ids and not needed <= set(params.allowed_token_ids)):
            name = "bad_words" if banned else "allowed_token_ids"
            raise ParamError(f"thinking_budget needs {tags.opening} and {tags.closing}, which {name} rules out")

    def part(self, prompt_token_ids: list[int], params: GenerationParams, *, is_chat: bool) -> Thinking | None:
        """The thinking part that a row's outputs may have: of chats whose template marks one, and with a budget.

        None where the prompt has closed it, or begun the answer.
        """
        tags = self._tags if params.thinking_budget is not None else self._template_tags if is_chat else None
        if tags is None or params.max_tokens == 0:
            return None
        tail = self._after_last_mark(prompt_token_ids, tags)
        opened, closed = (tail.rfind(tag.encode()) for tag in (tags.opening, tags.closing))
        return None if closed > opened else Thinking(tags.opening, tags.closing, is_open=opened >= 0)

    def constraint(
        self,
        part: Thinking | None,
        params: GenerationParams,
        make_answer: Callable[[GenerationParams], Constraint | None],
    ) -> Constraint | None:
        """The constraint of a row: the thinking part held to its budget, and what `make_answer` makes behind it.

        `make_answer` gets the parameters of the answer alone, which has what the part leaves of `max_tokens`.

        Raises:
            RowError: the answer's constraint can't be met.
        """
        if part is None or params.thinking_budget is None:
            return make_answer(params)
        from pagedbatch.constraints.thinking import ThinkingConstraint

        opening, closing = self._matchers
        ends = tuple(sorted(self._eos_token_ids | set(params.stop_token_ids)))
        whole = ThinkingConstraint(params.thinking_budget, opening, closing, part.is_open, None, self._vocab_size, ends)
        room = params.max_tokens - whole.num_overhead_tokens
        least = whole.num_overhead_tokens - params.thinking_budget
        own = replace(params, max_tokens=max(1, room), min_tokens=max(0, min(params.min_tokens - least, room)))
        try:
            answer = make_answer(own)
        except RowError as error:
            raise RowError(f"{error} (behind a thinking part of up to {whole.num_overhead_tokens} tokens)") from None
        if answer is not None and not set(ends).isdisjoint((*opening.token_ids, *closing.token_ids)):
            raise RowError("thinking_budget: an end token is part of the tags, so that the answer would never come")
        return replace(whole, answer=answer)

    @cached_property
    def _template_tags(self) -> _Tags | None:
        """The tags that the chat template names."""
        template = "".join(_templates(self._tokenizer))
        return next((_Tags(*tags) for tags in KNOWN_TAGS if tags[1] in template), None)

    @cached_property
    def _tags(self) -> _Tags | None:
        """The tags that the chat template names, else those that are tokens."""
        if self._template_tags is not None:
            return self._template_tags
        vocabulary = self._tokenizer.get_vocab()
        return next((_Tags(*tags) for tags in KNOWN_TAGS if vocabulary.keys() >= set(tags)), None)

    @cached_property
    def _matchers(self) -> tuple[TagMatcher, TagMatcher]:
        """Of the opening and of the closing tag."""
        assert self._tags is not None
        return self._matcher(self._tags.opening), self._matcher(self._tags.closing)

    def _matcher(self, text: str) -> TagMatcher:
        from pagedbatch.constraints.thinking import TagMatcher

        tag = text.encode()
        token_ids: tuple[int, ...] = tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        pieces = {token_id: self._bytes.literal(token_id, False) for token_id in token_ids}
        if tag not in b"".join(pieces[token_id] for token_id in token_ids):
            raise ParamError(f"thinking_budget: this model's tokenizer has no way to write {text}")
        if len(token_ids) > 1:  # other tokens may write it too
            size = min(self._vocab_size, len(self._tokenizer))
            every = ((token_id, self._bytes.literal(token_id, False)) for token_id in range(size))
            pieces |= {token_id: piece for token_id, piece in every if _takes_part(piece, tag)}
        return TagMatcher(tag, token_ids, pieces)

    def _after_last_mark(self, token_ids: list[int], tags: _Tags) -> bytes:
        """The end of a prompt, behind the last token that a template writes and a text doesn't."""
        marks, tail = self._marks, []
        for token_id in reversed(token_ids):
            piece = self._bytes.literal(token_id, False)
            if token_id in marks and piece.strip().decode(errors="replace") not in (tags.opening, tags.closing):
                break
            tail.append(piece)
        return b"".join(reversed(tail))

    @cached_property
    def _marks(self) -> frozenset[int]:
        """Special and added tokens but for blanks: those around the messages of a chat."""
        marks = self._bytes.special_ids | self._tokenizer.added_tokens_decoder.keys()
        return frozenset(i for i in marks if self._bytes.literal(i, False).strip())


def _takes_part(piece: bytes, tag: bytes) -> bool:
    """Whether a token can write some of a tag: it holds it, lies within it, or one's end is the other's beginning."""
    if not piece or tag in piece or piece in tag:
        return bool(piece)
    sizes = range(1, min(len(piece), len(tag)))
    return any(piece.endswith(tag[:size]) or tag.endswith(piece[:size]) for size in sizes)


def _templates(tokenizer: Any) -> list[str]:
    """Every chat template of a tokenizer."""
    template = getattr(tokenizer, "chat_template", None)
    named = template.values() if isinstance(template, Mapping) else [template]
    return [text for text in named if isinstance(text, str)]

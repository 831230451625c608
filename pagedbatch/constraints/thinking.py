"""The thinking part of an output, closed after a budget of tokens, and the answer behind it.

As a constraint it lets anything come until the budget is used up, and then the closing tag's tokens alone; where the
answer has a constraint of its own, that one begins behind the closing tag.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import lru_cache

import numpy as np

from pagedbatch.constraint import Allowed, AllowedIds, AllowedMask, Constraint, ConstraintState


@dataclass(frozen=True, slots=True)
class TagMatcher:
    """Finds a tag among generated tokens, however they cut it.

    `token_ids` are the tokens that write it. `pieces` are the bytes of all tokens that may take part in it; any other
    one breaks off what had matched.
    """

    tag: bytes
    token_ids: tuple[int, ...]
    pieces: Mapping[int, bytes]

    def step(self, matched: int, token_id: int) -> int:
        """How many bytes of the tag stand at the end, once `token_id` follows `matched` of them; the whole tag counts
        also where the token goes on behind it."""
        piece = self.pieces.get(token_id)
        if piece is None:
            return 0
        text = self.tag[:matched] + piece
        if self.tag in text:
            return len(self.tag)
        longest = min(len(self.tag) - 1, len(text))
        return next(size for size in range(longest, -1, -1) if text.endswith(self.tag[:size]))

    def left(self, recent: tuple[int, ...]) -> tuple[int, ...]:
        """The tokens that write what is missing of the tag behind the tokens `recent`."""
        for size in range(len(self.token_ids) - 1, 0, -1):
            if recent[-size:] == self.token_ids[:size]:
                return self.token_ids[size:]
        return self.token_ids


@dataclass(frozen=True, slots=True)
class ThinkingConstraint:
    """At most `budget` tokens between the opening tag and the closing one.

    `is_open`: the prompt has opened the part. Else it begins where the output writes the opening tag; where the answer
    has a constraint, it has to do so at once. `end_token_ids` may come while thinking only where the answer is free.
    """

    budget: int
    opening: TagMatcher
    closing: TagMatcher
    is_open: bool
    answer: Constraint | None
    vocab_size: int
    end_token_ids: tuple[int, ...]

    @property
    def num_overhead_tokens(self) -> int:
        """The most tokens before the answer, where the part has to come."""
        return (0 if self.is_open else len(self.opening.token_ids)) + self.budget + len(self.closing.token_ids)

    @property
    def max_tokens(self) -> int | None:
        longest = None if self.answer is None else self.answer.max_tokens
        return None if longest is None else self.num_overhead_tokens + longest

    def start(self) -> ThinkingState:
        state = ThinkingState(self)
        if self.is_open:
            state.begin_thinking()
        elif self.answer is not None:
            state.forced = self.opening.token_ids
        return state


class _Part(Enum):
    BEFORE = auto()
    THINKING = auto()
    ANSWER = auto()


@dataclass(slots=True)
class ThinkingState:
    """Where a sequence stands. `forced` are the tokens that must come next, `matched` the bytes of the awaited tag."""

    constraint: ThinkingConstraint
    part: _Part = _Part.BEFORE
    forced: tuple[int, ...] = ()
    matched: int = 0
    num_thought: int = 0
    recent: tuple[int, ...] = ()
    answer: ConstraintState | None = field(default=None)

    def allowed(self) -> Allowed | None:
        if self.forced:
            return AllowedIds(np.array(self.forced[:1], np.int64))
        if self.answer is not None:
            return self.answer.allowed()
        if self.constraint.answer is not None:
            return AllowedMask(_all_but(self.constraint.vocab_size, self.constraint.end_token_ids))
        return None

    def advance(self, token_id: int) -> None:
        if self.forced:
            self.forced = self.forced[1:]
            if not self.forced:
                self._leave_tag()
        elif self.part is _Part.BEFORE:
            self.matched = self.constraint.opening.step(self.matched, token_id)
            if self.matched == len(self.constraint.opening.tag):
                self.begin_thinking()
        elif self.part is _Part.THINKING:
            self._think(token_id)
        elif self.answer is not None:
            self.answer.advance(token_id)

    def fork(self) -> ThinkingState:
        answer = None if self.answer is None else self.answer.fork()
        return ThinkingState(
            self.constraint, self.part, self.forced, self.matched, self.num_thought, self.recent, answer
        )

    def begin_thinking(self) -> None:
        self.part, self.matched = _Part.THINKING, 0
        self._close_if_used_up()

    def _think(self, token_id: int) -> None:
        closing = self.constraint.closing
        self.num_thought += 1
        self.recent = (*self.recent, token_id)[-len(closing.token_ids) :]
        self.matched = closing.step(self.matched, token_id)
        if self.matched == len(closing.tag):
            self._begin_answer()
        else:
            self._close_if_used_up()

    def _close_if_used_up(self) -> None:
        if self.num_thought >= self.constraint.budget:
            self.forced = self.constraint.closing.left(self.recent)

    def _leave_tag(self) -> None:
        if self.part is _Part.BEFORE:
            self.begin_thinking()
        else:
            self._begin_answer()

    def _begin_answer(self) -> None:
        self.part = _Part.ANSWER
        if self.constraint.answer is not None:
            self.answer = self.constraint.answer.start()


@lru_cache(maxsize=64)
def _all_but(vocab_size: int, token_ids: tuple[int, ...]) -> np.ndarray:
    """All tokens but these, as in `AllowedMask`."""
    flags = np.zeros(-(-vocab_size // 32) * 32, bool)
    flags[:vocab_size] = True
    flags[list(token_ids)] = False
    return np.packbits(flags, bitorder="little").view("<i4")

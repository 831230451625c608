"""Splits the thinking part of an output from its answer."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from pagedbatch.engine.stopping import Detokenize
from pagedbatch.sequence import Thinking
from pagedbatch.token_bytes import TokenBytes


@dataclass(frozen=True, slots=True)
class SplitText:
    """A text in its two parts, without the tags and the line ends around them. `reasoning` is None if there is none.

    `num_tokens` counts the tokens between the tags.
    """

    reasoning: str | None
    answer: str
    num_tokens: int


def split_reasoning(
    text: str,
    token_ids: list[int],
    thinking: Thinking,
    token_bytes: TokenBytes,
    decode: Detokenize,
    skip_special_tokens: bool,
) -> SplitText:
    """
    Args:
        text: of `token_ids`, maybe cut at a stop string.
        decode: the tokenizer's.
    """
    opening, closing = thinking.opening.encode(), thinking.closing.encode()
    pieces = [token_bytes.literal(token_id, i == 0) for i, token_id in enumerate(token_ids)]
    data = b"".join(pieces)
    begin = 0
    if not thinking.is_open:
        begin = len(data) - len(data.lstrip()) if data.lstrip().startswith(opening) else -1
        begin = begin + len(opening) if begin >= 0 else begin
        if begin < 0 and closing not in data:
            return SplitText(None, text, 0)
    end = data.find(closing, max(0, begin))
    starts = list(accumulate((len(piece) for piece in pieces), initial=0))
    inside = slice(max(0, begin), len(data) if end < 0 else end)
    num_tokens = sum(
        inside.start <= start < inside.stop and token_id not in token_bytes.special_ids
        for token_id, start in zip(token_ids, starts, strict=False)
    )
    reasoning, answer = text, ""
    if end >= 0:
        reasoning, tag, answer = text.partition(thinking.closing)
        if not tag:  # a special token, which the text leaves out, or cut off
            num_before = sum(start < end + len(closing) for start in starts[:-1])
            boundary = len(decode(token_ids[:num_before], skip_special_tokens))
            reasoning, answer = text[:boundary], text[boundary:]
    if reasoning.lstrip().startswith(thinking.opening):
        reasoning = reasoning.lstrip().removeprefix(thinking.opening)
    return SplitText(reasoning.strip("\n"), answer.lstrip("\n"), num_tokens)

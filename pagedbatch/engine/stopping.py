"""When an output is complete: end tokens, stop token ids, stop strings, the length limit.

Stop strings need a `detokenize` function, given by the job.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pagedbatch.params import GenerationParams
from pagedbatch.sequence import TokenNode, output_token_ids

#: Text of generated token ids; the second argument says whether special tokens are left out.
Detokenize = Callable[[list[int], bool], str]

_BYTES_PER_CHARACTER = 4
#: What decoders show for bytes that make no character yet.
_HALF_A_CHARACTER = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True)
class Finish:
    """Why an output ended: `reason` is "stop" or "length"; `stop_reason` names the string or the token id."""

    reason: str
    stop_reason: str | int | None = None


LENGTH = Finish("length")


class StopChecker:
    """Decides whether the newest token completes an output."""

    def __init__(self, eos_token_ids: frozenset[int], detokenize: Detokenize | None) -> None:
        self.eos_token_ids = eos_token_ids
        self._detokenize = detokenize

    def end_tokens(self, params: GenerationParams) -> frozenset[int]:
        """The tokens that end an output of this request."""
        own = frozenset(params.stop_token_ids)
        return own if params.ignore_eos else own | self.eos_token_ids

    def num_end_tokens(self, params: GenerationParams) -> int:
        """How many different tokens end an output of this request."""
        return len(self.end_tokens(params))

    def check(self, params: GenerationParams, parent: TokenNode | None, token_id: int) -> Finish | None:
        """Whether `token_id` after the history `parent` completes the output, and why."""
        length = 1 + (0 if parent is None else parent.length)
        if length >= params.min_tokens:
            if token_id in self.eos_token_ids and not params.ignore_eos:
                return Finish("stop", token_id)
            if token_id in params.stop_token_ids:
                return Finish("stop", token_id)
            if params.stop:
                matched = self._match_stop_string(params, TokenNode(token_id, 0.0, parent))
                if matched is not None:
                    return Finish("stop", matched)
        return LENGTH if length >= params.max_tokens else None

    def _match_stop_string(self, params: GenerationParams, tail: TokenNode) -> str | None:
        """The stop string that comes first in the text, if the newest token completed one.

        Only a window of tokens is decoded. A token that shows at all holds at least one byte and a character at most
        four, so that four tokens per character, and some for what decoders do at a border, always cover a match. Where
        the window begins inside a character, some decoders show marks for all that follows: then it begins later.
        """
        if self._detokenize is None:
            return None
        window = _BYTES_PER_CHARACTER * max(map(len, params.stop)) + 8
        recent = output_token_ids(tail, last=window)
        for begin in range(_BYTES_PER_CHARACTER):
            text = self._detokenize(recent[begin:], params.skip_special_tokens)
            if any(s in text for s in params.stop):
                break
            if _HALF_A_CHARACTER not in text:
                return None
        else:
            return None
        found = find_stop_string(params, output_token_ids(tail), self._detokenize)
        return None if found is None else found[1]


def find_stop_string(params: GenerationParams, token_ids: list[int], detokenize: Detokenize) -> tuple[int, str] | None:
    """Where in the text of `token_ids` the first stop string begins, and which it is.

    One that was complete before `min_tokens` does not count: no token that may end the output completed it.
    """
    text = detokenize(token_ids, params.skip_special_tokens)
    before = token_ids[: max(0, params.min_tokens - 1)]
    skipped = detokenize(before, params.skip_special_tokens).rstrip(_HALF_A_CHARACTER)
    starts = ((text.find(s, max(0, len(skipped) - len(s) + 1)), s) for s in params.stop)
    return min((found for found in starts if found[0] >= 0), default=None)

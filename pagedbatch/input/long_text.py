"""Tokenizes only as much of a very long text as can matter.

Tokens near a cut may be others than in the whole text, so a beginning is long enough only with many more tokens than
fit. An end is taken only where its last tokens are the same whether it begins at one character or the next: then they
don't depend on where the cut is.
"""

from __future__ import annotations

from collections.abc import Callable

from pagedbatch.errors import RowError

Encode = Callable[[str], list[int]]

#: Texts of fewer characters are tokenized whole, whatever the context is.
_LONG_TEXT = 2**18
#: Tokens beyond twice the context that make a beginning long enough: a word on the cut is shorter.
_MARGIN = 256
#: Characters per token for the first try, and the growth from one try to the next.
_CHARACTERS = 4
_GROWTH = 8


def is_long(text: str, limit: int) -> bool:
    """Whether a text is worth the trouble, for a context of `limit` tokens."""
    return len(text) > max(_LONG_TEXT, _CHARACTERS * _enough(limit))


def check_fits(text: str, limit: int, encode: Encode) -> list[int]:
    """The token ids of a text that may fit.

    Raises:
        RowError: it has far more than `limit` tokens; not all of it was tokenized.
    """
    token_ids, size = _beginning(text, limit, encode)
    if size < len(text):
        raise RowError(
            f"the prompt is too long: the first {size:,} of its {len(text):,} characters are {len(token_ids):,} "
            f"tokens, and the model's limit is {limit} (--truncate-prompt cuts prompts)"
        )
    return token_ids


def first_token_ids(text: str, limit: int, encode: Encode) -> list[int]:
    """The text's token ids, all or more than `limit` of the first ones."""
    return _beginning(text, limit, encode)[0]


def last_token_ids(text: str, limit: int, encode: Encode) -> list[int]:
    """The text's token ids, all or more than `limit` of the last ones, of which `limit` are the whole text's own."""
    for size in _sizes(len(text) - 1, limit):
        token_ids = encode(text[-size:])
        if len(token_ids) >= _enough(limit) and encode(text[-size - 1 :])[-limit:] == token_ids[-limit:]:
            return token_ids
    return encode(text)


def _beginning(text: str, limit: int, encode: Encode) -> tuple[list[int], int]:
    """Token ids of a beginning, and its characters: of the whole text unless a shorter one has enough tokens."""
    for size in _sizes(len(text), limit):
        token_ids = encode(text[:size])
        if len(token_ids) >= _enough(limit):
            return token_ids, size
    return encode(text), len(text)


def _sizes(length: int, limit: int) -> list[int]:
    """Numbers of characters below `length` to try."""
    sizes = [_CHARACTERS * _enough(limit)]
    while sizes[-1] < length:
        sizes.append(_GROWTH * sizes[-1])
    return sizes[:-1]


def _enough(limit: int) -> int:
    return 2 * limit + _MARGIN

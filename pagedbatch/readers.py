"""How the value of a generation parameter is read: its type, and bounds that fit what it is used for.

Knows no parameter by name. Whatever is accepted here stays finite in the float32 arithmetic of the sampler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from pagedbatch.errors import ParamError
from pagedbatch.wording import short

#: A text, or the token ids of one.
BadWord = str | tuple[int, ...]
Reader = Callable[[str, Any], Any]

INT64 = 2**63 - 1
#: No tokenizer has more tokens, and no kernel counts further.
MAX_TOKEN_ID = 2**31 - 1
#: Whatever is added to scores: products and sums of a million of them are finite in float32.
MAX_ADDED = 1e9
MAX_STOPS, MAX_STOP_LENGTH = 2**10, 2**12
MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH = 2**16, 2**12


def is_unicode(text: str) -> bool:
    """Whether `text` can be written as UTF-8: JSON escapes can smuggle in lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def integer(low: int, high: int) -> Reader:
    """An integer from `low` to `high`."""

    def read(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ParamError(f"{name} must be an integer, got {short(value)}")
        _check_bounds(name, value, low, high)
        return value

    return read


def number(low: float, high: float, *, above_low: bool = False) -> Reader:
    """A finite number from `low` to `high`; `above_low`: `low` itself is left out."""

    def read(name: str, value: Any) -> float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or (isinstance(value, float) and not math.isfinite(value)):
            raise ParamError(f"{name} must be a finite number, got {short(value)}")
        if above_low and value <= low:
            raise ParamError(f"{name} must be above {low:g}, got {short(value)}")
        _check_bounds(name, value, low, high)  # before float(): an integer may be too large for one
        return float(value)

    return read


def _check_bounds(name: str, value: float, low: float, high: float) -> None:
    if value < low:
        raise ParamError(f"{name} must be {_bound(low)} or more, got {short(value)}")
    if value > high:
        raise ParamError(f"{name} must be at most {_bound(high)}, got {short(value)}")


def _bound(value: float) -> str:
    """A bound as it is read most easily."""
    if isinstance(value, int) and abs(value) > INT64 // 2:
        size = abs(value)
        text = f"2**{size.bit_length()} - 1" if size & 1 else f"2**{size.bit_length() - 1}"
        return text if value > 0 else f"-({text})"
    return f"{value:g}" if isinstance(value, float) else str(value)


def boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ParamError(f"{name} must be true or false, got {short(value)}")
    return value


def choice(*choices: str) -> Reader:
    """One of these words."""

    def read(name: str, value: Any) -> str:
        if value not in choices:
            raise ParamError(f"{name} must be {' or '.join(choices)}, got {short(value)}")
        return str(value)

    return read


def early_stopping(name: str, value: Any) -> bool | str:
    named = {"true": True, "false": False, "never": "never"}
    if isinstance(value, str) and value.lower() in named:
        value = named[value.lower()]
    if isinstance(value, bool) or value == "never":
        return "never" if value == "never" else bool(value)
    raise ParamError(f"{name} must be true, false or 'never', got {short(value)}")


def stop_strings(name: str, value: Any) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)) or not all(isinstance(item, str) and item for item in items):
        raise ParamError(f"{name} must be a non-empty string or a list of them, got {short(value)}")
    _check_sizes(name, items, MAX_STOPS, MAX_STOP_LENGTH)
    return tuple(items)


def _check_sizes(name: str, items: list[Any] | tuple[Any, ...], most: int, longest: int) -> None:
    if len(items) > most:
        raise ParamError(f"{name} takes at most {most} entries, got {len(items)}")
    if any(len(item) > longest for item in items):
        shown = short(max(items, key=len))
        raise ParamError(f"{name} takes entries of at most {longest} characters or tokens, got {shown}")


def _token_id(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ParamError(f"{name} must hold integers, got {short(value)}")
    if not 0 <= value <= MAX_TOKEN_ID:
        raise ParamError(f"{name}: {short(value)} is not a token id")
    return value


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """Each once, in the order in which they were given."""
    return tuple(dict.fromkeys(_listed_token_ids(name, value)))


def _listed_token_ids(name: str, value: Any) -> list[int]:
    items = [value] if isinstance(value, int) else value
    if not isinstance(items, (list, tuple)):
        raise ParamError(f"{name} must be a list of token ids, got {short(value)}")
    return [_token_id(name, item) for item in items]


def allowed_token_ids(name: str, value: Any) -> tuple[int, ...]:
    found = token_ids(name, value)
    if not found:
        raise ParamError(f"{name} is empty: nothing could be generated")
    return tuple(sorted(found))


def logit_bias(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, Mapping):
        raise ParamError(f"{name} must be an object of token id to bias, got {short(value)}")
    read_bias = number(-MAX_ADDED, MAX_ADDED)
    biases: dict[int, float] = {}
    for key, bias in value.items():
        try:
            token_id = _token_id(name, int(key) if isinstance(key, str) else key)
        except ValueError:
            raise ParamError(f"{name}: {short(key)} is not a token id") from None
        if token_id in biases:
            raise ParamError(f"{name}: token {token_id} stands there twice")
        biases[token_id] = read_bias(f"{name} of token {token_id}", bias)
    return tuple(sorted(biases.items()))


def bad_words(name: str, value: Any) -> tuple[BadWord, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)) or not all(isinstance(i, (str, list, tuple)) and i for i in items):
        raise ParamError(f"{name} must be a list of texts or of lists of token ids, got {short(value)}")
    _check_sizes(name, items, MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH)
    return tuple(item if isinstance(item, str) else tuple(_listed_token_ids(name, item)) for item in items)


def logprobs(most: int) -> Reader:
    """How many likely tokens to tell, up to `most`; false says that nobody asks."""
    read_count = integer(0, most)

    def read(name: str, value: Any) -> int | None:
        if value is False:
            return None
        count: int = read_count(name, value)
        return count

    return read

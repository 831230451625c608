"""How the value of an option is read: its type, its bounds, and how it is typed on the command line.

Whatever is accepted here stays finite in the float32 arithmetic of the sampler.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import date, datetime
from pathlib import Path
from typing import Any

from pagedbatch.errors import ParamError
from pagedbatch.wording import short

#: A text, or the token ids of one.
BadWord = str | tuple[int, ...]

INT64 = 2**63 - 1
#: No tokenizer has more tokens, and no kernel counts further.
MAX_TOKEN_ID = 2**31 - 1
#: Whatever is added to scores: products and sums of a million of them are finite in float32.
MAX_ADDED = 1e9
MAX_STOPS, MAX_STOP_LENGTH = 2**10, 2**12
MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH = 2**16, 2**12
#: What separates the cells of a CSV file, by name.
DELIMITERS = {"comma": ",", "tab": "\t", "semicolon": ";", "pipe": "|"}

_BYTES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"((?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*((?:[kmgt]i?)?)b?", re.IGNORECASE)
_DAY = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)


def _show(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True, slots=True)
class Reader:
    """Checks a value from JSON, TOML or the command line. Called with its name in messages and the value.

    Attributes:
        check: gives the value in the form that the program uses, or raises `ParamError`.
        metavar: stands for the value in the help.
        accepts: says in words what is accepted.
        flag_type: the type that the command line reads: a list where the flag may be repeated.
        decode: turns a text typed on the command line into the value, or raises `ParamError`.
        show: writes a default for the help.
    """

    check: Callable[[str, Any], Any]
    metavar: str
    accepts: str
    choices: tuple[str, ...] = ()
    flag_type: Any = str
    decode: Callable[[str, str], Any] | None = None
    show: Callable[[Any], str] = _show

    def __call__(self, name: str, value: Any) -> Any:
        return self.check(name, value)

    def typed(self, name: str, value: Any) -> Any:
        """The value of a flag as it was typed; an empty list was not typed at all.

        Raises:
            ParamError: it can't be decoded.
        """
        if self.decode is None or value is None:
            return None if value == [] else value
        if isinstance(value, list):
            return [self.decode(name, each) for each in value] or None
        return self.decode(name, value)


def reader(metavar: str, accepts: str, **more: Any) -> Callable[[Callable[[str, Any], Any]], Reader]:
    """A decorator: makes a reader of the function that checks the value."""
    return lambda check: Reader(check, metavar, accepts, **more)


def is_unicode(text: str) -> bool:
    """Whether `text` can be written as UTF-8: JSON escapes can smuggle in lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _unescape(_: str, typed: str) -> str:
    r"""Shells hand over `\n` as two characters; in a text to match or to fill it means a line end."""
    parts = typed.split("\\\\")
    return "\\".join(part.replace("\\n", "\n").replace("\\t", "\t") for part in parts)


def _json(name: str, typed: str) -> Any:
    try:
        return json.loads(typed)
    except json.JSONDecodeError as error:
        raise ParamError(f"{name}: malformed JSON: {error.msg} at column {error.colno}") from None


# Numbers


def integer(low: int, high: int, metavar: str = "INT") -> Reader:
    """An integer from `low` to `high`."""

    def read(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ParamError(f"{name} must be an integer, got {short(value)}")
        _check_bounds(name, value, low, high)
        return value

    bounds = f", {_bound(low)} or more" if high == INT64 else f" from {_bound(low)} to {_bound(high)}"
    return Reader(read, metavar, f"an integer{bounds}", flag_type=int)


def number(low: float, high: float, *, above_low: bool = False, metavar: str = "NUMBER") -> Reader:
    """A finite number from `low` to `high`; `above_low`: `low` itself is left out."""

    def read(name: str, value: Any) -> float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or (isinstance(value, float) and not math.isfinite(value)):
            raise ParamError(f"{name} must be a finite number, got {short(value)}")
        if above_low and value <= low:
            raise ParamError(f"{name} must be above {low:g}, got {short(value)}")
        _check_bounds(name, value, low, high)  # before float(): an integer may be too large for one
        return float(value)

    bounds = f"above {_bound(low)}, up to" if above_low else f"from {_bound(low)} to"
    return Reader(read, metavar, f"a number {bounds} {_bound(high)}", flag_type=float)


def _check_bounds(name: str, value: float, low: float, high: float) -> None:
    if value < low:
        raise ParamError(f"{name} must be {_bound(low)} or more, got {short(value)}")
    if value > high:
        raise ParamError(f"{name} must be at most {_bound(high)}, got {short(value)}")


def _bound(value: float) -> str:
    """A bound in its most readable form."""
    if isinstance(value, int) and abs(value) > INT64 // 2:
        bits = abs(value).bit_length()
        power = f"2**{bits} - 1" if value & 1 else f"2**{bits - 1}"
        return power if value > 0 else f"-({power})"
    return f"{value:g}" if isinstance(value, float) else str(value)


count = integer(1, INT64, "N")


def size(low: int = 0) -> Reader:
    """A number of bytes from `4GiB`, `512MiB`, `1e9`, `2G` or a plain number. G and GB are 10^9, GiB is 2^30."""

    def read(name: str, value: Any) -> int:
        typed = str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value
        match = _SIZE.fullmatch(typed.strip()) if isinstance(typed, str) else None
        num_bytes = float(match[1]) * _BYTES[match[2].lower()] if match else math.inf
        if not math.isfinite(num_bytes):
            raise ParamError(f"{name}: {short(value)} is not a size: write 4GiB, 512MiB, 2G or a number of bytes")
        if num_bytes < low:
            raise ParamError(f"{name} must be at least {low} byte, got {short(value)}")
        return int(num_bytes)

    return Reader(read, "SIZE", "a number of bytes, or a size such as 512MiB, 4GiB or 2G", show=_show_size)


def _show_size(num_bytes: int) -> str:
    unit = next((unit for unit in ("ti", "gi", "mi", "ki") if num_bytes % _BYTES[unit] == 0), "")
    return f"{num_bytes // _BYTES[unit]}{unit.capitalize()}B"


# Words


@reader("", "true or false", flag_type=bool, show=lambda value: "on" if value else "off")
def boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ParamError(f"{name} must be true or false, got {short(value)}")
    return value


def choice(*choices: str, **old: str) -> Reader:
    """One of these words. `old` ones are what they were called before."""

    def read(name: str, value: Any) -> str:
        if isinstance(value, str):
            value = old.get(value, value)
        if value not in choices:
            raise ParamError(f"{name} must be one of {', '.join(choices)}, got {short(value)}")
        return str(value)

    return Reader(read, "|".join(choices), f"one of {', '.join(choices)}", choices)


@reader(
    "true|false|never",
    "true, false or never",
    choices=("true", "false", "never"),
    show=lambda value: str(value).lower(),
)
def stopping_rule(name: str, value: Any) -> bool | str:
    named = {"true": True, "false": False, "never": "never"}
    if isinstance(value, str) and value.lower() in named:
        value = named[value.lower()]
    if isinstance(value, bool) or value == "never":
        return "never" if value == "never" else bool(value)
    raise ParamError(f"{name} must be true, false or 'never', got {short(value)}")


@reader("TEXT", "a text")
def text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ParamError(f"{name} must be a non-empty text, got {short(value)}")
    return value


escaped_text = replace(text, decode=_unescape)


@reader("TEXT", "a text or an object")
def text_or_object(name: str, value: Any) -> str | Mapping[str, Any]:
    return value if isinstance(value, Mapping) else str(text(name, value))


@reader("JSON", "a JSON object", decode=_json)
def json_object(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ParamError(f"{name} must be an object of names to values, got {short(value)}")
    return value


@reader("DAY", "a day as YYYY-MM-DD")
def day(name: str, value: Any) -> str:
    """A day as YYYY-MM-DD; a recipe may hold it as a date of TOML's own."""
    if isinstance(value, date) and not isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, str) and _DAY.fullmatch(value):
        try:
            return date.fromisoformat(value).isoformat()
        except ValueError:
            pass
    raise ParamError(f"{name} must be a day as YYYY-MM-DD, such as 2025-01-31, got {short(value)}")


@reader("|".join(DELIMITERS), f"one of {', '.join(DELIMITERS)}, or the character itself", choices=tuple(DELIMITERS))
def delimiter(name: str, value: Any) -> str:
    """The character itself, from it or from its name."""
    found = DELIMITERS.get(value, value) if isinstance(value, str) else None
    found = "\t" if found == "\\t" else found
    if found not in DELIMITERS.values():
        raise ParamError(f"{name} must be one of {', '.join(DELIMITERS)} or the character, got {short(value)}")
    return str(found)


@reader("FILE", "a file in a folder that exists")
def new_file(name: str, value: Any) -> str:
    folder = Path(text(name, value)).parent
    if not folder.is_dir():
        raise ParamError(f"{name}: there is no folder {folder}")
    return str(value)


# Lists


@reader("NAMES", "a list of names, or names with commas between them", flag_type=list[str])
def column_names(name: str, value: Any) -> tuple[str, ...]:
    parts = value if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(part, str) for part in parts):
        raise ParamError(f"{name} must be names of columns, got {short(value)}")
    return tuple(dict.fromkeys(name for part in parts for name in part.split(",") if name))


@reader("TEXT", "a text or a list of texts", flag_type=list[str], decode=_unescape)
def stop_strings(name: str, value: Any) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)) or not all(isinstance(item, str) and item for item in items):
        raise ParamError(f"{name} must be a non-empty string or a list of them, got {short(value)}")
    _check_sizes(name, items, MAX_STOPS, MAX_STOP_LENGTH)
    return tuple(items)


def _check_sizes(name: str, items: list[Any] | tuple[Any, ...], max_items: int, max_length: int) -> None:
    if len(items) > max_items:
        raise ParamError(f"{name} takes at most {max_items} entries, got {len(items)}")
    if any(len(item) > max_length for item in items):
        shown = short(max(items, key=len))
        raise ParamError(f"{name} takes entries of at most {max_length} characters or tokens, got {shown}")


def _token_id(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ParamError(f"{name} must hold integers, got {short(value)}")
    if not 0 <= value <= MAX_TOKEN_ID:
        raise ParamError(f"{name}: {short(value)} is not a token id")
    return value


def _listed_token_ids(name: str, value: Any) -> list[int]:
    items = [value] if isinstance(value, int) else value
    if not isinstance(items, (list, tuple)):
        raise ParamError(f"{name} must be a list of token ids, got {short(value)}")
    return [_token_id(name, item) for item in items]


@reader("ID", "a token id or a list of them", flag_type=list[int])
def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """Each once, in the order in which they were given."""
    return tuple(dict.fromkeys(_listed_token_ids(name, value)))


@reader("ID", "a token id or a list of them", flag_type=list[int])
def some_token_ids(name: str, value: Any) -> tuple[int, ...]:
    found = token_ids(name, value)
    if not found:
        raise ParamError(f"{name} is empty: nothing could be generated")
    return tuple(sorted(found))


@reader("JSON", f"an object of token ids to numbers from {-MAX_ADDED:g} to {MAX_ADDED:g}", decode=_json)
def biases(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, Mapping):
        raise ParamError(f"{name} must be an object of token id to bias, got {short(value)}")
    read_bias = number(-MAX_ADDED, MAX_ADDED)
    found: dict[int, float] = {}
    for key, bias in value.items():
        try:
            token_id = _token_id(name, int(key) if isinstance(key, str) else key)
        except ValueError:
            raise ParamError(f"{name}: {short(key)} is not a token id") from None
        if token_id in found:
            raise ParamError(f"{name}: token {token_id} is given twice")
        found[token_id] = read_bias(f"{name} of token {token_id}", bias)
    return tuple(sorted(found.items()))


@reader("TEXT", "a list of texts or of lists of token ids", flag_type=list[str], decode=_unescape)
def words_or_ids(name: str, value: Any) -> tuple[BadWord, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)) or not all(isinstance(i, (str, list, tuple)) and i for i in items):
        raise ParamError(f"{name} must be a list of texts or of lists of token ids, got {short(value)}")
    _check_sizes(name, items, MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH)
    return tuple(item if isinstance(item, str) else tuple(_listed_token_ids(name, item)) for item in items)


def num_logprobs(max_tokens: int) -> Reader:
    """How many of the most likely tokens to tell, up to `max_tokens`; false means none at all."""
    counted = integer(0, max_tokens, "K")
    return replace(counted, check=lambda name, value: None if value is False else counted(name, value))

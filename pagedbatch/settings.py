"""The settings of a run: names, types and defaults, and how command line, recipe and defaults are merged.

Knows nothing about flags' help texts, files of rows or models. Generation parameters are those of `params`.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import date, datetime
from pathlib import Path
from typing import Any, Literal

from pagedbatch.config import PreemptionMode
from pagedbatch.errors import ParamError, UsageError
from pagedbatch.params import READERS as GENERATION_READERS
from pagedbatch.params import GenerationParams, resolve
from pagedbatch.shard import Shard

Origin = Literal["command line", "recipe", "model", "default"]

#: What separates the cells of a CSV file, by name.
DELIMITERS = {"comma": ",", "tab": "\t", "semicolon": ";", "pipe": "|"}
_MOST_SECONDS = 86_400
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_MOST_TOKENS = 2**31 - 1
_SIZE = re.compile(r"((?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*((?:[kmgt]i?)?)b?", re.IGNORECASE)
_DAY = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Everything that `pagedbatch run` was told, checked. Sizes are in bytes.

    `generation` holds the generation parameters that were given for the whole run; `origins` says where each setting
    that is not at its default came from. `started` is when the run first started, in ISO format: known once its journal
    has been looked into.
    """

    input: str
    model: str
    output: str
    split: str | None = None
    subset: str | None = None
    streaming: bool = False
    csv_delimiter: str | None = None
    prompt_column: str | None = None
    prompt_template: str | None = None
    chat: bool = False
    chat_template_kwargs: Mapping[str, Any] | None = None
    date: str | None = None
    generation_config: str = "auto"
    constrain_to: str | None = None
    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    limit: int | None = None
    shard: str | None = None
    allow_duplicate_ids: bool = False
    served_model_name: str | None = None
    max_line_bytes: int = 64 * 2**20
    row_prepare_timeout: float = 5.0
    strict: bool = False
    keep: tuple[str, ...] = ()
    ignore_columns: tuple[str, ...] = ()
    workers: int | None = None
    ray_address: str | None = None
    restart: bool = False
    retry_errors: bool = False
    block_size: int = 16
    kv_memory: int | None = None
    num_blocks: int | None = None
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    preemption: PreemptionMode = "auto"
    swap_space: int = 2**30
    prefix_cache: bool = True
    attention: str = "auto"
    forward: Literal["auto", "plain"] = "auto"
    device: str = "auto"
    dtype: str = "auto"
    trust_remote_code: bool = False
    ignore_adapter: bool = False
    max_model_len: int | None = None
    generation: Mapping[str, Any]
    origins: Mapping[str, Origin]
    started: str | None = None

    @property
    def now(self) -> datetime:
        """What chat templates take for the present: `date`, else the first start of the run."""
        given = self.date or self.started
        return datetime.now() if given is None else datetime.fromisoformat(given)

    @property
    def model_names(self) -> tuple[str, ...]:
        """What OpenAI batch rows may call the model; their answers carry the first."""
        if self.served_model_name is not None:
            return (self.served_model_name,)
        return (self.model, Path(self.model).name)

    @property
    def uses_workers(self) -> bool:
        """Whether engines in processes of their own answer the rows."""
        return self.workers is not None or self.ray_address is not None

    def origin(self, name: str) -> Origin:
        return self.origins.get(name, "default")


def parse_size(name: str, value: Any) -> int:
    """A number of bytes from `4GiB`, `512MiB`, `1e9`, `2G` or a plain number. G and GB are 10^9, GiB is 2^30.

    Raises:
        UsageError: it is none of these.
    """
    text = str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value
    match = _SIZE.fullmatch(text.strip()) if isinstance(text, str) else None
    size = float(match[1]) * _UNITS[match[2].lower()] if match else math.inf
    if not math.isfinite(size):
        raise UsageError(f"{flag(name)}: {value!r} is not a size: write 4GiB, 512MiB, 2G or a number of bytes")
    return int(size)


def flag(name: str) -> str:
    """A setting's name as it is typed on the command line."""
    return name.upper() if name == "input" else f"--{name.replace('_', '-')}"


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise UsageError(f"{flag(name)} must be a non-empty text, got {value!r}")
    return value


def _text_or_table(name: str, value: Any) -> str | Mapping[str, Any]:
    return value if isinstance(value, Mapping) else _text(name, value)


def _table(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UsageError(f"{flag(name)} must be an object of names to values, got {value!r}")
    return value


def _date(name: str, value: Any) -> str:
    """A day as YYYY-MM-DD; a recipe may hold it as a date of TOML's own."""
    if isinstance(value, date) and not isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, str) and _DAY.fullmatch(value):
        try:
            return date.fromisoformat(value).isoformat()
        except ValueError:
            pass
    raise UsageError(f"{flag(name)} must be a day as YYYY-MM-DD, such as 2025-01-31, got {value!r}")


def _switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"{flag(name)} must be true or false, got {value!r}")
    return value


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{flag(name)} must be an integer of at least 1, got {value!r}")
    return value


def _context_length(name: str, value: Any) -> int:
    """At least a prompt's token and one more."""
    if _count(name, value) < 2 or value > _MOST_TOKENS:
        raise UsageError(f"{flag(name)} must lie between 2 and {_MOST_TOKENS}, got {value!r}")
    return int(value)


def _line_size(name: str, value: Any) -> int:
    size = parse_size(name, value)
    if size < 1:
        raise UsageError(f"{flag(name)} must be at least 1 byte, got {value!r}")
    return size


def _seconds(name: str, value: Any) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value <= _MOST_SECONDS:
        raise UsageError(f"{flag(name)} must be a number of seconds above 0, at most {_MOST_SECONDS}, got {value!r}")
    return float(value)


def _names(name: str, value: Any) -> tuple[str, ...]:
    """Column names: a list of them, or a text in which commas part them."""
    parts = value if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(part, str) for part in parts):
        raise UsageError(f"{flag(name)} must be names of columns, got {value!r}")
    return tuple(dict.fromkeys(name for part in parts for name in part.split(",") if name))


def _delimiter(name: str, value: Any) -> str:
    """The character itself, from it or from its name."""
    found = DELIMITERS.get(value, value) if isinstance(value, str) else None
    found = "\t" if found == "\\t" else found
    if found not in DELIMITERS.values():
        raise UsageError(f"{flag(name)} must be one of {', '.join(DELIMITERS)} or the character, got {value!r}")
    return str(found)


def _choice(*choices: str) -> Callable[[str, Any], str]:
    def read(name: str, value: Any) -> str:
        if value not in choices:
            raise UsageError(f"{flag(name)} must be one of {', '.join(choices)}, got {value!r}")
        return str(value)

    return read


_READERS: dict[str, Callable[[str, Any], Any]] = {
    "input": _text,
    "model": _text,
    "output": _text,
    "split": _text,
    "subset": _text,
    "streaming": _switch,
    "csv_delimiter": _delimiter,
    "prompt_column": _text,
    "prompt_template": _text,
    "chat": _switch,
    "chat_template_kwargs": _table,
    "date": _date,
    "generation_config": _choice("auto", "none"),
    "constrain_to": _text,
    "json_schema": _text_or_table,
    "regex": _text,
    "grammar": _text,
    "limit": _count,
    "shard": lambda _, value: str(Shard.parse(value)),
    "allow_duplicate_ids": _switch,
    "served_model_name": _text,
    "max_line_bytes": _line_size,
    "row_prepare_timeout": _seconds,
    "strict": _switch,
    "keep": _names,
    "ignore_columns": _names,
    "workers": _count,
    "ray_address": _text,
    "restart": _switch,
    "retry_errors": _switch,
    "block_size": _count,
    "kv_memory": parse_size,
    "num_blocks": _count,
    "max_num_seqs": _count,
    "max_num_batched_tokens": _count,
    "preemption": _choice("auto", "swap", "recompute"),
    "swap_space": parse_size,
    "prefix_cache": _switch,
    "attention": _choice("auto", "triton", "cpu", "torch"),
    "forward": _choice("auto", "plain"),
    "device": _choice("auto", "cpu", "cuda"),
    "dtype": _choice("auto", "float32", "bfloat16", "float16"),
    "trust_remote_code": _switch,
    "ignore_adapter": _switch,
    "max_model_len": _context_length,
}
assert set(_READERS) | {"generation", "origins", "started"} == {field.name for field in fields(RunSettings)}

#: Every name that may stand in a recipe or on the command line.
NAMES = frozenset(_READERS) | frozenset(GENERATION_READERS)

_REQUIRED = {"input": "the prompts: a file, - for stdin, or a dataset", "model": "", "output": ""}
_EITHER_OR = (
    ("kv_memory", "num_blocks"),
    ("prompt_column", "prompt_template"),
    ("constrain_to", "json_schema", "regex", "grammar"),
)


def read_recipe(path: str) -> dict[str, Any]:
    """The settings of a TOML recipe, by their names with underscores.

    Raises:
        UsageError: missing, malformed, or it holds a key that is no setting.
    """
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"--recipe {path}: no such file") from None
    except OSError as error:
        raise UsageError(f"--recipe {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"--recipe {path}: not UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"--recipe {path}: malformed TOML: {error}") from None
    settings: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in NAMES:
            raise UsageError(f"--recipe {path}: unknown key {key!r}{_nearest(name, NAMES)}")
        if name in settings:
            raise UsageError(f"--recipe {path}: {name} stands twice, with a dash and with an underscore")
        settings[name] = value
    return settings


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, sorted(known), n=1)
    return f": did you mean {close[0]!r}?" if close else ""


def merge(command_line: Mapping[str, Any], recipe: Mapping[str, Any]) -> RunSettings:
    """Settings from both layers over the defaults; the command line wins. `None` means "not given here".

    Raises:
        UsageError: a value is wrong, one is missing, or two can't be combined.
    """
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    layers: tuple[tuple[Origin, Mapping[str, Any]], ...] = (("recipe", recipe), ("command line", command_line))
    for origin, layer in layers:
        given = {name: value for name, value in layer.items() if value is not None}
        for name in _overridden(given):
            values.pop(name, None)
            origins.pop(name, None)
        values |= given
        origins |= dict.fromkeys(given, origin)
    for name, meaning in _REQUIRED.items():
        if name not in values:
            raise UsageError(f"{flag(name)} is missing" + (f": {meaning}" if meaning else ""))
    generation = {name: value for name, value in values.items() if name in GENERATION_READERS}
    _check_generation(generation)
    plain = {name: _READERS[name](name, value) for name, value in values.items() if name in _READERS}
    return RunSettings(**plain, generation=generation, origins=origins)


def _overridden(given: Mapping[str, Any]) -> Iterator[str]:
    """Of settings that say one thing in several ways, the stronger layer's stays: these names leave the weaker ones."""
    for names in _EITHER_OR:
        found = [name for name in names if name in given]
        if len(found) > 1:
            raise UsageError(f"{' and '.join(map(flag, found))} can't be combined: give one")
        if found:
            yield from names


def _check_generation(generation: Mapping[str, Any]) -> GenerationParams:
    try:
        return resolve({}, generation)
    except ParamError as error:
        raise UsageError(str(error)) from None

"""Lengths of requests: from a trace, or drawn at random. Knows no engine."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from pagedbatch.errors import UsageError

#: Column names of published traces, those that are tried first.
INPUT_COLUMNS = ("ContextTokens", "input_length", "num_prefill_tokens", "prompt_tokens", "input_tokens")
OUTPUT_COLUMNS = ("GeneratedTokens", "output_length", "num_decode_tokens", "completion_tokens", "output_tokens")


@dataclass(frozen=True, slots=True)
class RequestLengths:
    """A request in tokens. The first `prefix_tokens` of its prompt are those of every request of its `prefix` group."""

    prompt_tokens: int
    output_tokens: int
    prefix: int = 0
    prefix_tokens: int = 0


def log_normal(mean_prompt: float, mean_output: float, sigma: float, seed: int) -> Iterator[RequestLengths]:
    """Requests without end, prompt and output lengths log-normal with these means; every length is at least 1.

    `sigma` is the standard deviation of the logarithm, for both.
    """
    rng = random.Random(seed)

    def draw(mean: float) -> int:
        return max(1, round(rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)))

    while True:
        yield RequestLengths(draw(mean_prompt), draw(mean_output))


def read_trace(
    path: str, *, input_column: str | None = None, output_column: str | None = None, limit: int | None = None
) -> Iterator[RequestLengths]:
    """The requests of a trace, in order: any input that `pagedbatch run` reads, with a column for each length.

    Args:
        input_column, output_column: names of the columns; None takes the first of the well-known ones that is there.

    Raises:
        UsageError: the trace can't be read, or a row has no such length; the message names the row.
    """
    from pagedbatch.job.reader import open_source

    columns: tuple[str, str] | None = None
    for row in islice(open_source(path).rows(limit), limit):
        if row.error is not None:
            raise UsageError(f"{path}: {row.error}")
        if columns is None:
            columns = (
                _column(input_column, INPUT_COLUMNS, row.fields, path, "--input-column"),
                _column(output_column, OUTPUT_COLUMNS, row.fields, path, "--output-column"),
            )
        prompt, output = (_length(row.fields.get(name), f"{path}, {row.place}: {name}") for name in columns)
        yield RequestLengths(max(1, prompt), max(1, output))


def fit(request: RequestLengths, max_model_len: int) -> RequestLengths:
    """The request cut to a model's context: a prompt leaves room for one token, an output takes what is left."""
    prompt = min(request.prompt_tokens, max_model_len - 1)
    output = min(request.output_tokens, max_model_len - prompt)
    return RequestLengths(prompt, output, request.prefix, min(request.prefix_tokens, prompt))


def _column(asked: str | None, known: tuple[str, ...], fields: Mapping[str, Any], path: str, flag: str) -> str:
    if asked is not None:
        if asked not in fields:
            raise UsageError(f"{flag} {asked}: {path} has {', '.join(map(str, fields))}")
        return asked
    found = next((name for name in known if name in fields), None)
    if found is None:
        raise UsageError(f"{path}: name the column with {flag}; there are {', '.join(map(str, fields))}")
    return found


def _length(value: Any, place: str) -> int:
    try:
        length = int(value)
    except (TypeError, ValueError):
        length = -1
    if length < 0 or isinstance(value, bool):
        raise UsageError(f"{place} is {value!r}, not a number of tokens")
    return length

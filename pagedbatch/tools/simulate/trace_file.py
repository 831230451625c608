"""The lengths in a trace: any input that `pagedbatch run` reads, with a column for each length."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from pagedbatch.errors import UsageError
from pagedbatch.tools.simulate.trace import RequestLengths

#: Column names of published traces, in the order in which they are tried.
INPUT_COLUMNS = ("ContextTokens", "input_length", "num_prefill_tokens", "prompt_tokens", "input_tokens")
OUTPUT_COLUMNS = ("GeneratedTokens", "output_length", "num_decode_tokens", "completion_tokens", "output_tokens")


@dataclass(frozen=True, slots=True)
class TraceColumns:
    """The columns of a trace, as the flags name them.

    `input`, `output`: None takes the first well-known name that the trace has. A cell of `output` may be a list: a
    length for each sample. Rows with the same value in `prefix`, or all rows if it is None, begin with the same
    `prefix_length` tokens: a number, or the column that holds it.
    """

    input: str | None = None
    output: str | None = None
    prefix: str | None = None
    prefix_length: str | None = None

    def __post_init__(self) -> None:
        if self.prefix is not None and self.prefix_length is None:
            raise UsageError("--prefix-column needs --prefix-length: how many tokens those rows have in common")


def read_trace(path: str, columns: TraceColumns, limit: int | None = None) -> Iterator[RequestLengths]:
    """The requests of a trace, in order and unchanged: a length may be 0.

    Raises:
        UsageError: the trace can't be read, or a row has no such length; the message names the row.
    """
    from pagedbatch.input.reader import open_source

    found: TraceColumns | None = None
    groups: dict[Any, int] = {}
    for row in islice(open_source(path).rows(limit), limit):
        if row.error is not None:
            raise UsageError(f"{path}: {row.error}")
        found = found or _find(columns, row.fields, path)
        yield _request(found, row.fields, groups, f"{path}, {row.place}")


def _request(columns: TraceColumns, fields: Mapping[str, Any], groups: dict[Any, int], place: str) -> RequestLengths:
    """One row; `groups` numbers the values of the prefix column."""
    assert columns.input is not None
    assert columns.output is not None
    prompt = _length(fields.get(columns.input), f"{place}: {columns.input}")
    output, name = fields.get(columns.output), f"{place}: {columns.output}"
    samples = tuple(_length(each, name) for each in output) if isinstance(output, list) and output else None
    prefix, prefix_tokens = 0, 0
    if columns.prefix_length is not None:
        length = columns.prefix_length
        prefix_tokens = int(length) if length.isdecimal() else _length(fields.get(length), f"{place}: {length}")
        value = None if columns.prefix is None else str(fields.get(columns.prefix))
        prefix = groups.setdefault(value, len(groups))
    return RequestLengths(
        prompt_tokens=prompt,
        output_tokens=_length(output, name) if samples is None else max(samples),
        prefix=prefix,
        prefix_tokens=min(prefix_tokens, prompt),
        sample_tokens=samples,
    )


def _find(columns: TraceColumns, fields: Mapping[str, Any], path: str) -> TraceColumns:
    """The columns with their names in this trace."""

    def named(asked: str, flag: str) -> str:
        if asked not in fields:
            raise UsageError(f"{flag} {asked}: {path} has {', '.join(map(str, fields))}")
        return asked

    def known(asked: str | None, names: tuple[str, ...], flag: str) -> str:
        if asked is not None:
            return named(asked, flag)
        name = next((name for name in names if name in fields), None)
        if name is None:
            raise UsageError(f"{path}: name the column with {flag}; there are {', '.join(map(str, fields))}")
        return name

    length = columns.prefix_length
    return TraceColumns(
        input=known(columns.input, INPUT_COLUMNS, "--input-column"),
        output=known(columns.output, OUTPUT_COLUMNS, "--output-column"),
        prefix=None if columns.prefix is None else named(columns.prefix, "--prefix-column"),
        prefix_length=length if length is None or length.isdecimal() else named(length, "--prefix-length"),
    )


def _length(value: Any, place: str) -> int:
    try:
        length = int(value)
    except (TypeError, ValueError):
        length = -1
    if length < 0 or isinstance(value, bool):
        raise UsageError(f"{place} is {value!r}, not a number of tokens")
    return length

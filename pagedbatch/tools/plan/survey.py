"""One pass over the rows, as a run would make it: prompt lengths, the rows that can't run, and the first that can.

Knows no simulation and no weights.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass

from pagedbatch.config import EngineConfig
from pagedbatch.engine.admission import refusal
from pagedbatch.run.open import OpenedJob
from pagedbatch.sequence import Request

#: Of rows that can't run, so many are named.
_MOST_NAMED = 5
#: Where nobody says how many, rows are kept until their outputs may come to so many tokens, about three seconds of a
#: simulation; never fewer than fill the engine so many times.
_MOST_KEPT = 2000
_MOST_OUTPUT_TOKENS = 300_000
_LEAST_FILLS = 2
#: Rows between two words about how far the pass is.
_TELL_EVERY = 1000


@dataclass(frozen=True, slots=True)
class PromptTable:
    """Prompt lengths in tokens, of the rows that can run. `pN` is the length that N% of them don't exceed."""

    count: int
    min: int
    mean: float
    p50: int
    p90: int
    p99: int
    max: int


@dataclass(frozen=True, slots=True)
class RowsFound:
    """`refused` are the reasons of the first rows that can't run, each with its place; `num_refused` counts them all.

    `first` are requests of the first rows that can, numbered by row. `prompts` is None where none can.
    """

    num_rows: int
    num_refused: int
    refused: list[str]
    num_truncated: int
    prompts: PromptTable | None
    first: list[Request]

    @property
    def num_ok(self) -> int:
        return self.num_rows - self.num_refused


def read_rows(opened: OpenedJob, config: EngineConfig, num_kept: int | None, tell: Callable[[str], None]) -> RowsFound:
    """Prepares every row; of the requests no more is kept than the first `num_kept`, and each prompt's length.

    Args:
        config: of the engine that would run them.
        num_kept: None: as many as can be simulated in seconds.
        tell: takes a word about progress now and then.
    """
    lengths = array("Q")
    refused: list[str] = []
    first: list[Request] = []
    num_refused = num_truncated = num_sequences = output_tokens = 0
    rows = opened.rows
    all_prepared = opened.preparation.prepare(opened.source.rows(rows.stop, first=rows.start))
    for done, prepared in enumerate(each for each in all_prepared if each is not None):
        if done % _TELL_EVERY == 0:
            tell(f"reading rows: {done:,} of {len(rows):,}")
        request = prepared.request
        reason = prepared.error if request is None else _refusal(config, request, prepared.context.place)
        if request is None or reason is not None:
            num_refused += 1
            if len(refused) < _MOST_NAMED:
                refused.append(reason or "")
            continue
        lengths.append(len(request.prompt_token_ids))
        num_truncated += request.num_truncated_tokens > 0
        if num_kept is None:
            fills = num_sequences >= _LEAST_FILLS * config.max_num_seqs
            keeps = len(first) < _MOST_KEPT and not (fills and output_tokens >= _MOST_OUTPUT_TOKENS)
        else:
            keeps = len(first) < num_kept
        if keeps and len(first) == done - num_refused:  # else one before it was left out
            first.append(request)
            num_sequences += request.params.width
            output_tokens += request.params.width * request.params.max_tokens
    return RowsFound(
        num_rows=len(rows),
        num_refused=num_refused,
        refused=refused,
        num_truncated=num_truncated,
        prompts=_table(sorted(lengths)) if lengths else None,
        first=first,
    )


def _refusal(config: EngineConfig, request: Request, place: str) -> str | None:
    reason = refusal(config, request)
    return None if reason is None else f"{place}: {reason}"


def _table(lengths: list[int]) -> PromptTable:
    """Of lengths in ascending order, at least one; percentiles are nearest ranks."""

    def at(percent: int) -> int:
        return lengths[-(-percent * len(lengths) // 100) - 1]

    return PromptTable(
        count=len(lengths),
        min=lengths[0],
        mean=round(sum(lengths) / len(lengths), 2),
        p50=at(50),
        p90=at(90),
        p99=at(99),
        max=lengths[-1],
    )

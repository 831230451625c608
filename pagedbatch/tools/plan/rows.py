"""One pass over the rows, as a run would make it: prompt lengths, the rows that can't run, and the first that can."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass

from pagedbatch.config import EngineConfig
from pagedbatch.engine.admission import refusal
from pagedbatch.run.open import PreparedJob
from pagedbatch.sequence import Request

#: How many of the rows that can't run are named.
_MAX_NAMED = 5
#: Without `--simulate-rows`, rows are kept until their outputs may have this many tokens, about three seconds of a
#: simulation, but at least as many as fill the engine twice.
_MAX_KEPT = 2000
_MAX_OUTPUT_TOKENS = 300_000
_MIN_FILLS = 2
#: Rows between two lines about progress.
_ROWS_PER_LINE = 1000


@dataclass(frozen=True, slots=True)
class PromptLengths:
    """Prompt lengths in tokens, of the rows that can run. `pN` is the length that N% of them don't exceed."""

    count: int
    min: int
    mean: float
    p50: int
    p90: int
    p99: int
    max: int


@dataclass(frozen=True, slots=True)
class PlannedRows:
    """`refused` says why the first rows that can't run can't, each with its place; `num_refused` counts all of them.

    `first` has the requests of the first rows that can, numbered by row. `prompts` is None if none can.
    """

    num_rows: int
    num_refused: int
    refused: list[str]
    num_truncated: int
    prompts: PromptLengths | None
    first: list[Request]

    @property
    def num_ok(self) -> int:
        return self.num_rows - self.num_refused


def read_rows(
    job: PreparedJob, config: EngineConfig, num_kept: int | None, show_progress: Callable[[str], None]
) -> PlannedRows:
    """Prepares every row, and keeps the length of each prompt and the first `num_kept` requests.

    Args:
        config: of the engine that would run them.
        num_kept: None: as many as can be simulated in seconds.
        show_progress: takes a line about progress now and then.
    """
    lengths = array("Q")
    refused: list[str] = []
    first: list[Request] = []
    num_refused = num_truncated = num_sequences = output_tokens = 0
    rows = job.input.rows
    all_prepared = job.preparation.prepare(job.input.source.rows(rows.stop, first=rows.start))
    for done, prepared in enumerate(each for each in all_prepared if each is not None):
        if done % _ROWS_PER_LINE == 0:
            show_progress(f"reading rows: {done:,} of {len(rows):,}")
        request = prepared.request
        reason = prepared.error if request is None else _refusal(config, request, prepared.context.place)
        if request is None or reason is not None:
            num_refused += 1
            if len(refused) < _MAX_NAMED:
                refused.append(reason or "")
            continue
        lengths.append(request.num_input_tokens)
        num_truncated += request.num_truncated_tokens > 0
        if num_kept is None:
            fills = num_sequences >= _MIN_FILLS * config.max_num_seqs
            keeps = len(first) < _MAX_KEPT and not (fills and output_tokens >= _MAX_OUTPUT_TOKENS)
        else:
            keeps = len(first) < num_kept
        if keeps and len(first) == done - num_refused:  # no gap: the first ones only
            first.append(request)
            num_sequences += request.params.width
            output_tokens += request.params.width * request.params.max_tokens
    return PlannedRows(
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


def _table(lengths: list[int]) -> PromptLengths:
    """Of lengths in ascending order, at least one; percentiles are nearest ranks."""

    def at(percent: int) -> int:
        return lengths[-(-percent * len(lengths) // 100) - 1]

    return PromptLengths(
        count=len(lengths),
        min=lengths[0],
        mean=round(sum(lengths) / len(lengths), 2),
        p50=at(50),
        p90=at(90),
        p99=at(99),
        max=lengths[-1],
    )

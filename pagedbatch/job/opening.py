"""All of a job that comes before weights and journal: its input, its tokenizer, and what is refused at once.

Knows no engine and no output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pagedbatch.job.checks import check_columns, check_every_row, refuse_broken
from pagedbatch.job.constraints import ConstraintSource, read_run_constraint
from pagedbatch.job.feeder import Preparer
from pagedbatch.job.keep import KeptColumns
from pagedbatch.job.reader import ReadOptions, Source, Survey, open_source, survey
from pagedbatch.job.settings import RunSettings
from pagedbatch.job.shard import rows_to_run
from pagedbatch.job.startup import TextSide, open_text_side


@dataclass(frozen=True, slots=True)
class OpenedJob:
    """An input that was surveyed, and what makes requests of its rows. `rows` are those that are to be answered."""

    source: Source
    found: Survey
    rows: range
    constraint: ConstraintSource | None
    text: TextSide
    preparer: Preparer


def open_job(settings: RunSettings, notice: Callable[[str], None]) -> OpenedJob:
    """Opens the input and loads the tokenizer; with `strict`, goes through every row.

    Raises:
        UsageError: something is wrong with the settings, the input or the model.
    """
    source = open_source(settings.input, read_options(settings))
    found = survey(
        source,
        limit=settings.limit,
        allow_duplicate_ids=settings.allow_duplicate_ids,
        on_broken=notice if settings.strict else None,
    )
    if settings.strict:
        refuse_broken(found.num_broken, found.num_rows)
    check_columns(settings, source, found)
    rows = rows_to_run(settings.shard, found.num_rows)
    constraint = read_run_constraint(settings)
    text = open_text_side(settings, constraint, notice)
    preparer = Preparer(text.prompts, KeptColumns(settings.keep), settings.model_names)
    if settings.strict:
        check_every_row(source, found, preparer, notice)
    return OpenedJob(source, found, rows, constraint, text, preparer)


def read_options(settings: RunSettings) -> ReadOptions:
    """How the settings ask for the input to be read."""
    return ReadOptions(
        split=settings.split,
        subset=settings.subset,
        streaming=settings.streaming,
        max_line_bytes=settings.max_line_bytes,
        limit=settings.limit,
        csv_delimiter=settings.csv_delimiter,
    )

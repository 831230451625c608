"""All of a job that comes before weights and journal: its input, its tokenizer, and what is refused at once.

Knows no engine and no output.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagedbatch.constraints.build import ConstraintSource, read_run_constraint
from pagedbatch.input.fields.columns import ColumnWatch
from pagedbatch.input.kept_columns import KeptColumns
from pagedbatch.input.prefetch import Preparer
from pagedbatch.input.preparation.limits import RowLimits
from pagedbatch.input.preparation.preparation import Preparation, open_preparation
from pagedbatch.input.reader import ReadOptions, Source, Survey, open_source, survey
from pagedbatch.run.checks import check_columns, check_every_row
from pagedbatch.run.startup import TextSide, open_text_side
from pagedbatch.settings import RunSettings
from pagedbatch.shard import rows_to_run


@dataclass(frozen=True, slots=True)
class OpenedInput:
    """An input that was surveyed. `rows` are those that are to be answered, `constraint` is that of all of them."""

    source: Source
    found: Survey
    rows: range
    constraint: ConstraintSource | None


@dataclass(frozen=True, slots=True)
class OpenedJob:
    """An input that was surveyed, and what makes requests of its rows. `rows` are those that are to be answered.

    To be closed.
    """

    source: Source
    found: Survey
    rows: range
    constraint: ConstraintSource | None
    text: TextSide
    preparation: Preparation

    def close(self) -> None:
        """Ends the process that prepares rows."""
        self.preparation.close()


def open_input(settings: RunSettings) -> OpenedInput:
    """Opens the input and goes through it once.

    Raises:
        UsageError: something is wrong with the settings or the input.
    """
    source = open_source(settings.input, read_options(settings))
    watch = ColumnWatch(settings)
    found = survey(source, limit=settings.limit, allow_duplicate_ids=settings.allow_duplicate_ids, on_row=watch.see)
    watch.log_near_misses(source.name)
    check_columns(settings, source, found)
    watch.refuse_lacked(source.name)
    rows = rows_to_run(settings.shard, found.num_rows)
    return OpenedInput(source, found, rows, read_run_constraint(settings))


def open_job(settings: RunSettings, given: OpenedInput) -> OpenedJob:
    """Loads the tokenizer; with `strict`, goes through every row.

    Raises:
        UsageError: something is wrong with the settings, the rows or the model.
    """
    text = open_text_side(settings, given.constraint)
    preparation = preparation_of(settings, text)
    try:
        if settings.strict:
            check_every_row(given.source, given.found, preparation)
    except BaseException:
        preparation.close()
        raise
    return OpenedJob(given.source, given.found, given.rows, given.constraint, text, preparation)


def preparation_of(settings: RunSettings, text: TextSide) -> Preparation:
    """What prepares the rows of a run; to be made before weights are loaded, and to be closed."""
    preparer = Preparer(text.prompts, KeptColumns(settings.keep), settings.model_names)
    return open_preparation(preparer, RowLimits(cpu_seconds=settings.row_prepare_timeout))


def read_options(settings: RunSettings) -> ReadOptions:
    """How the settings ask for the input to be read."""
    return ReadOptions(
        split=settings.split,
        subset=settings.subset,
        streaming=settings.streaming,
        max_line_bytes=settings.max_line_bytes,
        ignore_columns=settings.ignore_columns,
        limit=settings.limit,
        csv_delimiter=settings.csv_delimiter,
    )

"""What a job opens before weights and journal: its input, its tokenizer, and the checks that can fail at once."""

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
from pagedbatch.run.setup import TokenizerSetup, set_up_tokenizer
from pagedbatch.settings import RunSettings
from pagedbatch.shard import rows_to_run


@dataclass(frozen=True, slots=True)
class JobInput:
    """An input after one pass over it. `rows` are those to run; `constraint` applies to all of them."""

    source: Source
    survey: Survey
    rows: range
    constraint: ConstraintSource | None


@dataclass(frozen=True, slots=True)
class PreparedJob:
    """An input, and what turns its rows into requests. To be closed: rows may be prepared in another process."""

    input: JobInput
    tokenizer_setup: TokenizerSetup
    preparation: Preparation

    def close(self) -> None:
        self.preparation.close()


def open_input(settings: RunSettings) -> JobInput:
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
    return JobInput(source, found, rows, read_run_constraint(settings))


def prepare_job(settings: RunSettings, job_input: JobInput) -> PreparedJob:
    """Loads the tokenizer; with `strict`, prepares every row once to check it.

    Raises:
        UsageError: something is wrong with the settings, the rows or the model.
    """
    tokenizer_setup = set_up_tokenizer(settings, job_input.constraint)
    preparation = preparation_of(settings, tokenizer_setup)
    try:
        if settings.strict:
            check_every_row(job_input.source, job_input.survey, preparation)
    except BaseException:
        preparation.close()
        raise
    return PreparedJob(job_input, tokenizer_setup, preparation)


def preparation_of(settings: RunSettings, tokenizer_setup: TokenizerSetup) -> Preparation:
    """What prepares the rows of a run. To be made before the weights are loaded, and to be closed."""
    preparer = Preparer(tokenizer_setup.prompts, KeptColumns(settings.keep), settings.model_names)
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

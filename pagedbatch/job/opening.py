"""All of a job that comes before weights and journal: its input, its tokenizer, and what is refused at once.

Knows no engine and no output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pagedbatch.job.checks import check_columns, check_every_row
from pagedbatch.job.constraints import ConstraintSource, read_run_constraint
from pagedbatch.job.feeder import Preparer
from pagedbatch.job.keep import KeptColumns
from pagedbatch.job.preparation.limits import RowLimits
from pagedbatch.job.preparation.notices import Notices
from pagedbatch.job.preparation.preparation import Preparation, open_preparation
from pagedbatch.job.reader import ReadOptions, Source, Survey, open_source, survey
from pagedbatch.job.settings import RunSettings
from pagedbatch.job.shard import rows_to_run
from pagedbatch.job.startup import TextSide, open_text_side


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


def open_job(settings: RunSettings, notice: Callable[[str], None]) -> OpenedJob:
    """Opens the input and loads the tokenizer; with `strict`, goes through every row.

    Raises:
        UsageError: something is wrong with the settings, the input or the model.
    """
    source = open_source(settings.input, read_options(settings))
    found = survey(source, limit=settings.limit, allow_duplicate_ids=settings.allow_duplicate_ids)
    check_columns(settings, source, found)
    rows = rows_to_run(settings.shard, found.num_rows)
    constraint = read_run_constraint(settings)
    notices = Notices(notice)
    text = open_text_side(settings, constraint, notices)
    opened = OpenedJob(source, found, rows, constraint, text, preparation_of(settings, text, notices))
    try:
        if settings.strict:
            check_every_row(source, found, opened.preparation, notice)
    except BaseException:
        opened.close()
        raise
    return opened


def preparation_of(settings: RunSettings, text: TextSide, notices: Notices) -> Preparation:
    """What prepares the rows of a run; to be made before weights are loaded, and to be closed.

    Args:
        notices: what the text side was opened with.
    """
    preparer = Preparer(text.prompts, KeptColumns(settings.keep), settings.model_names)
    return open_preparation(preparer, RowLimits(cpu_seconds=settings.row_prepare_timeout), notices)


def read_options(settings: RunSettings) -> ReadOptions:
    """How the settings ask for the input to be read."""
    return ReadOptions(
        split=settings.split,
        subset=settings.subset,
        streaming=settings.streaming,
        max_line_bytes=settings.max_line_bytes,
        limit=settings.limit,
    )

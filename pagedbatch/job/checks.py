"""What is refused before anything slow starts: columns that no row has and, with --strict, any broken row.

Knows rows and their preparation; no journal and no engine.
"""

from __future__ import annotations

from collections.abc import Callable

from pagedbatch.errors import UsageError
from pagedbatch.job.feeder import Preparer
from pagedbatch.job.keep import ALL_COLUMNS
from pagedbatch.job.prompts import PROMPT_FIELDS, template_fields
from pagedbatch.job.reader import Source, Survey
from pagedbatch.job.settings import RunSettings
from pagedbatch.stats.wording import plural


def check_columns(settings: RunSettings, source: Source, found: Survey) -> None:
    """Refuses a run in which no row has what prompts are made of, or what is to be kept. Single rows may lack it.

    Raises:
        UsageError: it names the column and lists those that there are.
    """
    if not found.columns:
        return
    place = f"{source.name}, split {settings.split}," if settings.split else source.name
    listed = ", ".join(found.columns) + source.hint
    needed = [("--keep", name) for name in settings.keep if name != ALL_COLUMNS]
    if settings.prompt_column is not None:
        needed.append(("--prompt-column", settings.prompt_column))
    elif settings.prompt_template is not None:
        needed += [("--prompt-template", name) for name in template_fields(settings.prompt_template)]
    elif not any(name in found.columns for name in (*PROMPT_FIELDS, "custom_id", "body")):
        raise UsageError(
            f"{place} has no column prompt, messages or prompt_token_ids: "
            f"choose one with --prompt-column; its columns are {listed}"
        )
    for setting, name in needed:
        if found.has_all_columns and name not in found.columns and name.partition(".")[0] not in found.columns:
            raise UsageError(f"{setting}: {place} has no column {name!r}; its columns are {listed}")


def check_every_row(source: Source, found: Survey, preparer: Preparer, notice: Callable[[str], None]) -> None:
    """Prepares every row as the run would, and reports those that can't be answered.

    Raises:
        UsageError: there are some.
    """
    errors = (preparer.prepare(row).error for row in source.rows(found.num_rows))
    refuse_broken(sum(_report(error, notice) for error in errors if error is not None), found.num_rows)


def refuse_broken(num_broken: int, num_rows: int) -> None:
    """Ends a strict run, each of whose broken rows was reported before.

    Raises:
        UsageError: there are some.
    """
    if num_broken:
        raise UsageError(f"--strict: {num_broken} of {plural(num_rows, 'row')} can't be answered; nothing was started")


def _report(error: str, notice: Callable[[str], None]) -> int:
    notice(error)
    return 1

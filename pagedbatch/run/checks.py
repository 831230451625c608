"""What is refused before anything slow starts: columns that no row has and, with --strict, any broken row."""

from __future__ import annotations

import logging

from pagedbatch.errors import UsageError
from pagedbatch.input.fields.field_table import PROMPT_FIELDS
from pagedbatch.input.kept_columns import ALL_COLUMNS
from pagedbatch.input.preparation.preparation import Preparation
from pagedbatch.input.reader import Source, Survey
from pagedbatch.input.requests import template_fields
from pagedbatch.settings import RunSettings
from pagedbatch.wording import plural

_log = logging.getLogger(__name__)


def check_columns(settings: RunSettings, source: Source, found: Survey) -> None:
    """Refuses a run if no row has the columns that prompts are made of, or those to keep. Single rows may lack them.

    Raises:
        UsageError: it names the missing column and lists the columns of the input.
    """
    if not found.columns:
        return
    place = f"{source.name}, split {settings.split}," if settings.split else source.name
    listed = ", ".join(found.columns) + source.hint
    needed = [("--keep", name) for name in settings.keep if name != ALL_COLUMNS]
    needed += [("--ignore-columns", name) for name in settings.ignore_columns]
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


def check_every_row(source: Source, found: Survey, preparation: Preparation) -> None:
    """Prepares every row as the run would, and logs the errors in input order.

    Raises:
        UsageError: there were errors.
    """
    num_broken = 0
    for prepared in preparation.prepare(source.rows(found.num_rows)):
        if prepared is not None and prepared.error is not None:
            num_broken += 1
            _log.error(prepared.error)
    if num_broken:
        rows = plural(found.num_rows, "row")
        raise UsageError(f"--strict: {num_broken} of {rows} can't be answered; nothing was started")

"""Watches the keys of plain rows in the survey: options of other tools that are not here, and typing mistakes.

What a column asks for and can't have stops the run before it starts. Memory: a place for each key that is told of.
"""

from __future__ import annotations

import json
import logging

from pagedbatch.errors import UsageError
from pagedbatch.input.fields.field_table import KNOWN, LACKED
from pagedbatch.input.fields.near_names import nearest_option
from pagedbatch.input.requests import template_fields
from pagedbatch.input.row import Row
from pagedbatch.settings import RunSettings

_log = logging.getLogger(__name__)

#: Numbers of near misses and of unsupported options that are reported.
_MAX_NEAR_MISSES = 20
_MAX_LACKED = 3


class ColumnWatch:
    """What the keys of the rows seen so far would lose in silence.

    A column that makes the prompts is read: it is data. One that `--keep` names is no typing mistake.
    """

    def __init__(self, settings: RunSettings) -> None:
        template = settings.prompt_template
        names = () if template is None else template_fields(template)
        if settings.prompt_column is not None:
            names = (settings.prompt_column,)
        self._prompt_columns = _with_outer(names)
        self._named = self._prompt_columns | _with_outer(settings.keep)
        self._lacked: dict[str, str] = {}
        self._near_misses: dict[str, str] = {}

    def see(self, row: Row) -> None:
        """Notes the keys of a row."""
        for name, value in row.watched.items():
            if name in KNOWN:
                lacked = LACKED.get(name)
                if lacked is None or name in self._lacked or name in self._prompt_columns:
                    continue
                if lacked.is_asked_by(value):
                    self._lacked[name] = row.place
            elif value is not None and nearest_option(name) is not None:
                is_new = name not in self._named and name not in self._near_misses
                if is_new and len(self._near_misses) < _MAX_NEAR_MISSES:
                    self._near_misses[name] = row.place

    def log_near_misses(self, source: str) -> None:
        """A line for each key that was probably meant to be an option."""
        for name, place in self._near_misses.items():
            meant = nearest_option(name)
            _log.warning('%s, %s: column %s is not read; did you mean "%s"?', source, place, json.dumps(name), meant)

    def refuse_lacked(self, source: str) -> None:
        """Refuses a run whose rows ask for what is not here.

        Raises:
            UsageError: they do; it says how to let a data column of that name pass.
        """
        if not self._lacked:
            return
        described = []
        for name, place in list(self._lacked.items())[:_MAX_LACKED]:
            instead = LACKED[name].instead
            described.append(f'"{name}" ({place}{f"; here there is {instead}" if instead else ""})')
        more = len(self._lacked) - len(described)
        listed = ", ".join(described) + (f" and {more} more" if more else "")
        raise UsageError(
            f"{source}: rows ask for what this program does not have: {listed}. Take the column out, or let it pass "
            f"as data with --ignore-columns {','.join(self._lacked)}"
        )


def _with_outer(names: tuple[str, ...]) -> frozenset[str]:
    """Columns by their names; of `a.b` also `a`."""
    return frozenset(names) | {name.partition(".")[0] for name in names}

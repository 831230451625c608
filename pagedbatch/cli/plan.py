"""`pagedbatch plan`: takes the flags of a run and shows what that run would need."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from pagedbatch.cli.flags import RECIPE, settings_of, takes_options
from pagedbatch.cli.terminal import say
from pagedbatch.errors import UsageError
from pagedbatch.run.interrupts import EXIT_INTERRUPTED, Interrupts
from pagedbatch.settings import OPTIONS

_plan = partial(typer.Option, rich_help_panel="Plan")
#: As `run` ends where rows are errors.
_ROWS_FAIL = 3


#: A plan is for one process, and writes no output.
_OPTIONS = [each for each in OPTIONS.values() if each.group not in ("Workers", "Output") and each.name != "output"]


@takes_options([*_OPTIONS, RECIPE])
def plan(
    expect_tokens: Annotated[
        int | None,
        _plan(
            min=1,
            metavar="N",
            help="Expected mean length of outputs that may end before their limit. (default: a quarter of it)",
        ),
    ] = None,
    simulate_rows: Annotated[
        int | None,
        _plan(
            min=1,
            metavar="N",
            help="Number of rows to simulate; all are read. (default: what takes seconds, 2,000 at most)",
        ),
    ] = None,
    json_file: Annotated[Path | None, _plan("--json", metavar="FILE", help="Write all figures to this file.")] = None,
    **flags: Any,
) -> int:
    """Show what a run would need: memory, rows at once, sharing, rows that can't be answered. Reads no weights."""
    from rich.console import Console

    from pagedbatch.tools.plan.plan import make_plan
    from pagedbatch.tools.plan.tables import print_plan

    settings = settings_of(flags, output="-")  # whatever a recipe says of the output, none needs to be possible
    if json_file is not None and not json_file.parent.is_dir():
        raise UsageError(f"--json: there is no folder {json_file.parent}")
    try:
        with Interrupts(), Console(stderr=True).status("") as status:
            found = make_plan(
                settings, expect_tokens=expect_tokens, simulated_rows=simulate_rows, notice=say, tell=status.update
            )
    except KeyboardInterrupt:
        say("interrupted: nothing was written")
        return EXIT_INTERRUPTED
    if json_file is not None:
        json_file.write_text(json.dumps(found.as_dict(), indent=1) + "\n", encoding="utf-8")
    print_plan(found, Console())
    return _ROWS_FAIL if found.rows.num_refused else 0

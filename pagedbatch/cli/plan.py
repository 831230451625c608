"""`pagedbatch plan`: the flags of a run, and what that run would need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from pagedbatch.cli.run import given_settings
from pagedbatch.cli.run_flags import takes_run_flags
from pagedbatch.cli.terminal import say
from pagedbatch.errors import UsageError
from pagedbatch.run.interrupts import EXIT_INTERRUPTED, Interrupts

_PLAN = "Plan"
_EXPECT_HELP = "Mean tokens of outputs that may end by themselves. (default: a quarter of their limit)"
_ROWS_HELP = "Rows to simulate, the first ones; all are read. (default: what takes seconds, 2,000 at most)"
#: As `run` ends where rows are errors.
_ROWS_FAIL = 3


@takes_run_flags(without=("Workers", "Output"))
def plan(
    expect_tokens: Annotated[
        int | None, typer.Option(min=1, rich_help_panel=_PLAN, show_default=False, help=_EXPECT_HELP)
    ] = None,
    simulate_rows: Annotated[
        int | None, typer.Option(min=1, rich_help_panel=_PLAN, show_default=False, help=_ROWS_HELP)
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", rich_help_panel=_PLAN, help="Write all figures here.")
    ] = None,
    **flags: Any,
) -> int:
    """Tell what a run would need: memory, rows at once, sharing, rows that can't run. Reads no weights."""
    from rich.console import Console

    from pagedbatch.settings import merge, read_recipe
    from pagedbatch.tools.plan.plan import make_plan
    from pagedbatch.tools.plan.tables import print_plan

    recipe = flags.pop("recipe")
    # A plan writes no output: whatever a recipe says of one, none needs to be possible.
    given = given_settings(flags) | {"output": "-"}
    settings = merge(given, {} if recipe is None else read_recipe(recipe))
    if json_file is not None and not json_file.parent.is_dir():
        raise UsageError(f"--json: there is no folder {json_file.parent}")
    try:
        with Interrupts(), Console(stderr=True).status("") as status:
            found = make_plan(
                settings,
                expect_tokens=expect_tokens,
                simulated_rows=simulate_rows,
                notice=say,
                show_progress=status.update,
            )
    except KeyboardInterrupt:
        say("interrupted: nothing was written")
        return EXIT_INTERRUPTED
    if json_file is not None:
        json_file.write_text(json.dumps(found.as_dict(), indent=1) + "\n", encoding="utf-8")
    print_plan(found, Console())
    return _ROWS_FAIL if found.rows.num_refused else 0

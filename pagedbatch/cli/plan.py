"""`pagedbatch plan`: takes the flags of a run and shows what that run would need."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pagedbatch.cli.flags import RECIPE, settings_of, takes_options, values_of
from pagedbatch.cli.terminal import say
from pagedbatch.errors import ExitCode
from pagedbatch.options import option, options_of
from pagedbatch.readers import count, new_file
from pagedbatch.run.interrupts import Interrupts
from pagedbatch.settings import OPTIONS

_plan = partial(option, group="Plan")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What `plan` is told beside the options of the run."""

    expect_tokens: int | None = _plan(
        None,
        count,
        "Expected mean length of outputs that may end before their limit.",
        default_text="a quarter of the limit",
    )
    simulate_rows: int | None = _plan(
        None, count, "Number of rows to simulate; all are read.", default_text="what takes seconds, 2,000 at most"
    )
    json: str | None = _plan(None, new_file, "Write all figures to this file.")


_OPTIONS = options_of(PlanOptions)
#: A plan is for one process, and writes no output.
_OF_THE_RUN = [each for each in OPTIONS.values() if each.group not in ("Workers", "Output") and each.name != "output"]


@takes_options(*_OPTIONS.values(), *_OF_THE_RUN, RECIPE)
def plan(**flags: Any) -> int:
    """Show what a run would need: memory, rows at once, sharing, rows that can't be answered. Reads no weights."""
    from rich.console import Console

    from pagedbatch.tools.plan.plan import make_plan
    from pagedbatch.tools.plan.tables import print_plan

    own = PlanOptions(**values_of(_OPTIONS, flags))
    settings = settings_of(flags, output="-")  # whatever a recipe says of the output, none needs to be possible
    try:
        with Interrupts(), Console(stderr=True).status("") as status:
            found = make_plan(
                settings,
                expect_tokens=own.expect_tokens,
                simulated_rows=own.simulate_rows,
                notice=say,
                show_progress=status.update,
            )
    except KeyboardInterrupt:
        say("interrupted: nothing was written")
        return ExitCode.INTERRUPTED
    if own.json is not None:
        Path(own.json).write_text(json.dumps(found.as_dict(), indent=1) + "\n", encoding="utf-8")
    print_plan(found, Console())
    return ExitCode.ROW_ERRORS if found.rows.num_refused else ExitCode.OK

"""`pagedbatch run`: its flags, and the terminal around a job."""

from __future__ import annotations

from typing import Any

from pagedbatch.cli.flags import RECIPE, settings_of, takes_options
from pagedbatch.cli.terminal import say
from pagedbatch.errors import ExitCode
from pagedbatch.printable import printable_values
from pagedbatch.settings import OPTIONS


@takes_options(*OPTIONS.values(), RECIPE)
def run(**flags: Any) -> int:
    """Answer every row of INPUT. The same command again resumes a run that was interrupted.

    Example: pagedbatch run prompts.jsonl --model HuggingFaceTB/SmolLM2-135M-Instruct --chat --output answers.jsonl
    """
    settings = settings_of(flags)
    from rich.console import Console

    from pagedbatch.cli.progress import make_progress
    from pagedbatch.report.summary import summary
    from pagedbatch.run.job import Ui, run_job

    console = Console(stderr=True)
    ui = Ui(notice=say, open_view=lambda total, resumed: make_progress(total, resumed, console))
    try:
        result = run_job(settings, ui)
    except KeyboardInterrupt:
        say("interrupted before the first row")
        return ExitCode.INTERRUPTED
    summary(printable_values(result.stats), console)
    if result.paths is not None:
        say(f"stats     {result.paths.stats}")
        if result.exit_code != ExitCode.INTERRUPTED:
            say(f"output    {result.paths.output}")
    return result.exit_code

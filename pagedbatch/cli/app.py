"""The command `pagedbatch`: its subcommands, and how errors end it. Nothing slow is imported here."""

from __future__ import annotations

import gc
import os
import sys
from typing import Annotated

import typer

from pagedbatch import __version__
from pagedbatch.cli.bench import bench
from pagedbatch.cli.doctor import doctor
from pagedbatch.cli.help import MAX_WIDTH, HelpCommand, HelpGroup
from pagedbatch.cli.merge import merge
from pagedbatch.cli.plan import plan
from pagedbatch.cli.report import report
from pagedbatch.cli.run import run
from pagedbatch.cli.simulate import simulate
from pagedbatch.cli.terminal import say
from pagedbatch.errors import ExitCode, PagedBatchError, RunError

#: Set in the environment, errors come with their traceback.
_TRACEBACK = "PAGEDBATCH_TRACEBACK"

#: New objects after which Python looks for garbage. Imports and weights make a million objects that stay: with Python's
#: default of 700, looking through them again and again would take a fifth of the start-up.
_GARBAGE_THRESHOLD = 100_000

app = typer.Typer(
    name="pagedbatch",
    cls=HelpGroup,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": MAX_WIDTH},
)
for command in (run, merge, plan, report, bench, simulate, doctor):
    app.command(cls=HelpCommand)(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"pagedbatch {__version__}")
        raise typer.Exit


@app.callback()
def pagedbatch(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Offline batch inference: a file of prompts in, a file of answers out, through one paged KV pool."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(ExitCode.USAGE)


def main() -> None:
    """Runs the command line and exits. Whatever goes wrong is one line on stderr and an exit code."""
    gc.set_threshold(_GARBAGE_THRESHOLD)
    try:
        sys.exit(app(prog_name="pagedbatch", standalone_mode=False) or 0)
    except PagedBatchError as error:
        hint = f" ({_TRACEBACK}=1 shows where)" if isinstance(error, RunError) and error.__cause__ else ""
        _fail(f"{error}{hint}", error.exit_code, error)
    except typer.TyperException as error:
        _fail(" ".join(error.format_message().split()), ExitCode.USAGE, error)
    except BrokenPipeError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the exit's own flush is quiet
        _fail("the output was closed by its reader", ExitCode.FAILED, error)


def _fail(message: str, exit_code: int, error: BaseException) -> None:
    if os.environ.get(_TRACEBACK):
        raise error
    say(f"error: {message}")
    sys.exit(exit_code)

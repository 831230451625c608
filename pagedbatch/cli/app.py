"""The command `pagedbatch`: its subcommands, and how errors end it. Imports nothing slow."""

from __future__ import annotations

import gc
import os
import sys
from typing import Annotated

import typer

from pagedbatch import __version__
from pagedbatch.cli.bench import bench
from pagedbatch.cli.doctor import doctor
from pagedbatch.cli.merge import merge
from pagedbatch.cli.plan import plan
from pagedbatch.cli.report import report
from pagedbatch.cli.run import run
from pagedbatch.cli.simulate import simulate
from pagedbatch.cli.terminal import say
from pagedbatch.errors import PagedBatchError, RunError, UsageError

#: Typer's class of wrong-usage errors, under a public name's parents: it has no public name itself.
_WrongUsage: type[Exception] = typer.BadParameter.__mro__[1]

#: Set in the environment, errors come with their traceback.
_TRACEBACK = "PAGEDBATCH_TRACEBACK"

#: New objects that Python looks through for garbage at a time. Imports and weights make a million that stay: by its own
#: measure, 700, a fifth of the start-up would go into looking through them, over and over.
_GARBAGE_THRESHOLD = 100_000

app = typer.Typer(
    name="pagedbatch",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(run)
app.command()(merge)
app.command()(plan)
app.command()(report)
app.command()(bench)
app.command()(simulate)
app.command()(doctor)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"pagedbatch {__version__}")
        raise typer.Exit


@app.callback()
def pagedbatch(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Offline batch inference: a file of prompts in, a file of answers out, through one paged KV pool."""


def main() -> None:
    """Runs the command line and exits: whatever goes wrong is one line on stderr and an exit code of the contract."""
    gc.set_threshold(_GARBAGE_THRESHOLD)
    try:
        sys.exit(app(standalone_mode=False) or 0)
    except PagedBatchError as error:
        hint = f" ({_TRACEBACK}=1 shows where)" if isinstance(error, RunError) and error.__cause__ else ""
        _fail(f"{error}{hint}", error.exit_code, error)
    except _WrongUsage as error:
        _fail(_usage_message(error), UsageError.exit_code, error)
    except BrokenPipeError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the exit's own flush is quiet
        _fail("whoever read the output has gone", PagedBatchError.exit_code, error)


def _usage_message(error: Exception) -> str:
    message: str = error.format_message() if hasattr(error, "format_message") else str(error)
    return " ".join(message.split())


def _fail(message: str, exit_code: int, error: BaseException) -> None:
    if os.environ.get(_TRACEBACK):
        raise error
    if message:  # none: the help was asked for by giving no command
        say(f"error: {message}")
    sys.exit(exit_code)

"""Makes the flags of a command from the table of options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

import typer

from pagedbatch.errors import UsageError
from pagedbatch.options import Option
from pagedbatch.readers import text
from pagedbatch.settings import OPTIONS, RunSettings, merge, read_recipe

RECIPE = Option(
    name="recipe",
    read=text,
    default=None,
    group="Job",
    help="TOML file with any of these options, as names with underscores. The command line wins over it.",
    metavar="FILE",
)

Command = TypeVar("Command", bound=Callable[..., int])


def takes_options(*options: Option) -> Callable[[Command], Command]:
    """A decorator: the command's `**flags` become these options.

    They arrive as they were typed, and None where they were not given, so that a recipe can give them.
    """

    def decorate(command: Command) -> Command:
        command.__signature__ = inspect.Signature(list(map(_parameter, options)))  # type: ignore[attr-defined]
        return command

    return decorate


def values_of(options: Mapping[str, Option], flags: Mapping[str, Any]) -> dict[str, Any]:
    """The value of each option, from flags as they were typed and from the defaults.

    Raises:
        UsageError: a value is wrong, or one is missing.
    """
    values = {}
    for name, each in options.items():
        typed = each.typed(flags[name])
        if typed is None and each.is_required:
            raise UsageError(f"{each.flag} is missing")
        values[name] = each.default if typed is None else each.checked(typed)
    return values


def settings_of(flags: Mapping[str, Any], **fixed: Any) -> RunSettings:
    """The settings that the flags of a run and its recipe give; `fixed` ones are not theirs to give.

    Raises:
        UsageError: a value is wrong, one is missing, or two can't be combined.
    """
    given = {name: each.typed(flags[name]) for name, each in OPTIONS.items() if name in flags}
    return merge(given | fixed, {} if flags["recipe"] is None else read_recipe(flags["recipe"]))


def _parameter(option: Option) -> inspect.Parameter:
    choices = option.read.choices
    shared: dict[str, Any] = {
        "help": option.full_help,
        "metavar": option.metavar or option.read.metavar or None,
        "rich_help_panel": option.group,
        "autocompletion": (lambda: list(choices)) if choices else None,
    }
    described: Any
    if option.is_argument:
        described = typer.Argument(**shared | {"metavar": option.flag})
    else:
        on_off = f"{option.flag}/--no-{option.flag[2:]}" if option.read.flag_type is bool else option.flag
        described = typer.Option(*filter(None, [on_off, option.short]), **shared)
    annotation = Annotated[option.read.flag_type | None, described]  # type: ignore[name-defined]
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)

"""Makes the flags of a command from the table of options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Annotated, Any, TypeVar

import typer

from pagedbatch.options import Option
from pagedbatch.readers import text
from pagedbatch.settings import RunSettings, merge, read_flags, read_recipe

RECIPE = Option(
    name="recipe",
    read=text,
    default=None,
    group="Job",
    help="TOML file with any of these options, as names with underscores. The command line wins over it.",
    metavar="FILE",
)

Command = TypeVar("Command", bound=Callable[..., int])


def takes_options(options: Iterable[Option]) -> Callable[[Command], Command]:
    """A decorator: the command's `**flags` become these options, behind its own parameters.

    They arrive as they were typed, and None where they were not given, so that a recipe can give them.
    """
    taken = [_parameter(each) for each in options]

    def decorate(command: Command) -> Command:
        own = inspect.signature(command, eval_str=True).parameters.values()
        named = [each.replace(kind=each.KEYWORD_ONLY) for each in own if each.kind is not each.VAR_KEYWORD]
        command.__signature__ = inspect.Signature([*named, *taken])  # type: ignore[attr-defined]
        return command

    return decorate


def settings_of(flags: dict[str, Any], **fixed: Any) -> RunSettings:
    """The settings that the command line and its recipe give; `fixed` ones are not theirs to give.

    Raises:
        UsageError: a value is wrong, one is missing, or two can't be combined.
    """
    recipe = flags.pop("recipe")
    return merge(read_flags(flags) | fixed, {} if recipe is None else read_recipe(recipe))


def _parameter(option: Option) -> inspect.Parameter:
    choices = option.read.choices
    shared: dict[str, Any] = {
        "help": option.full_help,
        "show_default": False,
        "metavar": option.metavar or option.read.metavar or None,
        "rich_help_panel": option.group,
        "autocompletion": (lambda: list(choices)) if choices else None,
    }
    described: Any
    if option.name == "input":
        described = typer.Argument(**shared)
    else:
        on_off = f"{option.flag}/--no-{option.flag[2:]}" if option.read.flag_type is bool else option.flag
        described = typer.Option(*filter(None, [on_off, option.short]), **shared)
    annotation = Annotated[option.read.flag_type | None, described]  # type: ignore[name-defined]
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)

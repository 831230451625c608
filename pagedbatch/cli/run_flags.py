"""Gives another command the flags of `pagedbatch run`. Knows no setting by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container
from typing import Any, TypeVar

from pagedbatch.cli.run import run

Command = TypeVar("Command", bound=Callable[..., int])


def takes_run_flags(without: Container[str]) -> Callable[[Command], Command]:
    """A decorator: the command's `**flags` become the flags of `run`, but for those of the panels in `without`.

    They come as `run` gets them: None where they were not given.
    """

    def decorate(command: Command) -> Command:
        own = [each for each in _parameters(command) if each.kind is not inspect.Parameter.VAR_KEYWORD]
        taken = [each for each in _parameters(run) if _panel(each) not in without]
        command.__signature__ = inspect.Signature([*taken, *own], return_annotation=int)  # type: ignore[attr-defined]
        return command

    return decorate


def _parameters(command: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(command, eval_str=True).parameters.values())


def _panel(parameter: inspect.Parameter) -> str | None:
    """The panel of the help in which a flag stands."""
    return next((getattr(each, "rich_help_panel", None) for each in parameter.annotation.__metadata__), None)

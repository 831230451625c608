"""The text of `--help`: an entry has its flags on one line and its help below, at any width of the terminal.

Typer's own help puts both side by side, which cuts long flags and leaves 20 characters per line for the help.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import textwrap
from collections.abc import Mapping
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

MAX_WIDTH = 100
_INDENT = "      "
_SHORT_DEFAULT = re.compile(r"\(default: \S{1,20}\)")


class HelpCommand(TyperCommand):
    """A command whose help is written by this module."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _write_help(self, ctx, formatter)


class HelpGroup(TyperGroup):
    """The command above all others; its help lists them."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _write_help(self, ctx, formatter, self.commands)


def _write_help(command: Any, ctx: Any, formatter: Any, subcommands: Mapping[str, Any] | None = None) -> None:
    width = formatter.width
    params = [each for each in command.get_params(ctx) if not getattr(each, "hidden", False)]
    arguments = ["COMMAND ..."] if subcommands else [_argument(each) for each in params if _is_argument(each)]
    formatter.write(f"Usage: {' '.join([ctx.command_path, '[OPTIONS]', *arguments])}\n")
    for paragraph in _paragraphs(command):
        formatter.write(f"\n{_wrapped(paragraph, width, '  ')}")
    groups: dict[str, list[str]] = {}
    for name, each in (subcommands or {}).items():
        groups.setdefault("Commands", []).append(_entry(name, _paragraphs(each)[0], width))
    for param in params:
        group = param.rich_help_panel or ("Arguments" if _is_argument(param) else "Options")
        groups.setdefault(group, []).append(_entry(_names(param), _help(param), width))
    groups["Options"] = groups.pop("Options")  # last: what is no part of the command's work, such as --help
    for group, entries in groups.items():
        formatter.write(f"\n{_styled(group, underline=True)}\n{''.join(entries)}")


def _is_argument(param: Any) -> bool:
    return bool(param.param_type_name == "argument")


def _paragraphs(command: Any) -> list[str]:
    return inspect.cleandoc(command.help or "").split("\n\n")


def _argument(param: Any) -> str:
    name = f"{param.metavar}..." if param.nargs == -1 else param.metavar
    return name if param.required else f"[{name}]"


def _names(param: Any) -> str:
    """The flags of an option and what follows them: `-m, --model TEXT`."""
    if _is_argument(param):
        return str(param.metavar)
    names = " / ".join([", ".join(sorted(param.opts, key=len)), *param.secondary_opts])
    return names if param.metavar is None else f"{names} {param.metavar}"


def _help(param: Any) -> str:
    return f"{param.help} (required)" if param.required else str(param.help)


def _entry(names: str, text: str, width: int) -> str:
    return f"{_styled(_wrapped(names, width, '  ').rstrip())}\n{_wrapped(text, width, _INDENT)}"


def _wrapped(text: str, width: int, indent: str) -> str:
    """Lines of whole words, in which a short default stays in one piece."""
    text = _SHORT_DEFAULT.sub(lambda found: found[0].replace(" ", "\xa0"), text)
    wrapped = textwrap.fill(
        text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )
    return wrapped.replace("\xa0", " ") + "\n"


def _styled(text: str, underline: bool = False) -> str:
    """In bold where the help goes to a terminal that wants it."""
    plain = not sys.stdout.isatty() or "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    return text if plain else typer.style(text, bold=True, underline=underline)

"""One option of a run: declared once, as a field of a dataclass, with its type, bounds, default, help and group.

Flags, `--help`, recipe keys, row keys and docs/options.md are made from these records. They are declared in
`settings.RunSettings` and `params.GenerationParams`; `settings.OPTIONS` is the whole table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, Literal

from pagedbatch.errors import ParamError, UsageError
from pagedbatch.readers import Reader

#: Groups of the help, in its order.
GROUPS = (
    "Job",
    "Input",
    "Output",
    "Prompts",
    "Length and stopping",
    "Sampling",
    "Penalties and token filters",
    "Logprobs",
    "Beam search",
    "Constraints",
    "Memory and scheduling",
    "Model and device",
    "Workers",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """What is known of an option.

    Attributes:
        default: the value where nobody gives one; `MISSING` where one must be given.
        default_text: says what the default is where `default` alone does not.
        row_key: the key by which a row gives it; empty: rows can't.
        short: a flag of one letter, such as `-m`.
        metavar: stands for the value in the help, in place of the reader's.
        is_argument: it is typed without a flag.
        in_manifest: whether the journal's manifest holds it, because it decides what is written. "if set" is for those
            that came later: the manifests of earlier versions lack them.
    """

    name: str = ""
    read: Reader
    default: Any
    group: str
    help: str
    default_text: str = ""
    row_key: str = ""
    short: str = ""
    metavar: str = ""
    is_argument: bool = False
    in_manifest: Literal["no", "always", "if set"] = "no"

    @property
    def flag(self) -> str:
        """How it is typed on the command line."""
        return self.name.upper() if self.is_argument else f"--{self.name.replace('_', '-')}"

    @property
    def is_required(self) -> bool:
        return self.default is MISSING

    @property
    def shown_default(self) -> str:
        """The default in words; empty where nothing needs to be said."""
        if self.default_text or self.is_required or self.default in (None, ()):
            return self.default_text
        return self.read.show(self.default)

    @property
    def full_help(self) -> str:
        """The help, and what holds where the option is not given."""
        if self.is_required:
            return f"{self.help} (required)"
        return f"{self.help} (default: {self.shown_default})" if self.shown_default else self.help

    def typed(self, value: Any) -> Any:
        """The value that was typed on the command line, decoded; None: it was not given.

        Raises:
            UsageError: it can't be decoded.
        """
        return _as_usage(self.read.typed, self.flag, value)

    def checked(self, value: Any) -> Any:
        """A value in the form that the program uses.

        Raises:
            UsageError: the option can't have this value.
        """
        return _as_usage(self.read.check, self.flag, value)


def _as_usage(read: Callable[[str, Any], Any], name: str, value: Any) -> Any:
    try:
        return read(name, value)
    except ParamError as error:
        raise UsageError(str(error)) from None


def option(default: Any, read: Reader, help: str, *, group: str, **more: Any) -> Any:
    """A dataclass field that is an option; `more` are attributes of `Option`."""
    return _field(Option(read=read, default=default, group=group, help=help, **more))


def like(shared: Option, **changes: Any) -> Any:
    """A dataclass field that is an option of another command, here with some `changes`."""
    return _field(replace(shared, **changes))


def _field(described: Option) -> Any:
    return field(default=described.default, metadata={"option": described})


def options_of(declaring: Any, *, in_rows: bool = False) -> dict[str, Option]:
    """The options that a dataclass declares, by name; other fields are left out. `in_rows`: rows may give them too."""
    found: dict[str, Option] = {}
    for each in fields(declaring):
        described = each.metadata.get("option")
        if described is not None:
            row_key = each.name if in_rows else described.row_key
            found[each.name] = replace(described, name=each.name, row_key=row_key)
    return found

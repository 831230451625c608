"""Writes docs/options.md from the table of options: `make docs`."""

from __future__ import annotations

from pathlib import Path

from pagedbatch.options import GROUPS, Option
from pagedbatch.settings import OPTIONS

PAGE = Path(__file__).resolve().parent / "options.md"

BEGINNING = """# Options of `pagedbatch run`

Made from the program's own table of options by `make docs`: don't edit this page.

An option is given by a flag, as below; one that is true or false also has the flag `--no-...`. A recipe
(`--recipe FILE.toml`) gives it by its name with underscores, such as `max_tokens = 64`. Where a row may give it, its
key is named here, and [rows.md](rows.md) lists what other tools call it. A row wins over the command line, the command
line over the recipe, the recipe over the model's generation config, and that over the defaults.

`pagedbatch plan` takes the same options, without `--output` and the groups Output and Workers.
"""


def page() -> str:
    """The text of docs/options.md."""
    parts = [BEGINNING]
    for group in GROUPS:
        parts += [f"## {group}\n", *(_entry(each) for each in OPTIONS.values() if each.group == group)]
    return "\n".join(parts)


def _entry(option: Option) -> str:
    flags = ", ".join(f"`{name}`" for name in (option.flag, option.short) if name)
    facts = [f"Value: {_escaped(option.read.accepts)}."]
    if option.is_required:
        facts.append("Required.")
    elif option.shown_default:
        facts.append(f"Default: {option.shown_default}.")
    if option.row_key == option.name:
        facts.append(f"In a recipe or a row: `{option.name}`.")
    else:
        facts.append(f"In a recipe: `{option.name}`.")
    if option.row_key not in ("", option.name):
        facts.append(f"In a row: `{option.row_key}`.")
    return f"### {flags}\n\n{_escaped(option.help)}\n\n{' '.join(facts)}\n"


def _escaped(text: str) -> str:
    r"""Markdown that reads as `text` does: `\n` and `**` are no marks here."""
    return text.replace("\\", "\\\\").replace("*", "\\*").replace("<", "\\<")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

"""What can be read from the source of a chat template, and the clock that it sees."""

from __future__ import annotations

from datetime import datetime
from functools import lru_cache

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

#: The function by which a template asks for the time, and the variable by which Llama's ask for the date.
NOW = "strftime_now"
DATE = "date_string"

_DIRECTIVES = "aAbBcCdDeFgGhHIjklmMnpPrRsStTuUVwWxXyYzZ"
#: `strftime` in a template's own language: each directive is replaced by what it stands for. The line end at
#: its end is one that jinja leaves out, being behind a tag, so that the template which follows begins a line.
_CLOCK = """\
{% macro strftime_now(format) %}\
{%- for part in format.split('%%') -%}\
{%- set ns = namespace(text=part) -%}\
{%- for directive, value in VALUES.items() -%}{%- set ns.text = ns.text.replace(directive, value) -%}{%- endfor -%}\
{{- '' if loop.first else '%' -}}{{- ns.text -}}\
{%- endfor -%}\
{% endmacro %}
"""


class _Generation(Extension):
    """The tag that transformers adds to jinja: it marks what an assistant wrote, and changes nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=32)
def variables_of(template: str) -> frozenset[str] | None:
    """The variables and functions that a template reads and does not set itself; None where it can't be parsed."""
    environment = jinja2.Environment(extensions=[_Generation, loopcontrols])
    try:
        return frozenset(meta.find_undeclared_variables(environment.parse(template)))
    except Exception:  # rendering it will say what is wrong
        return None


def reads(template: str, name: str) -> bool:
    """Whether a template reads a variable; where that can't be told, it may."""
    variables = variables_of(template)
    return variables is None or name in variables


@lru_cache(maxsize=32)
def with_clock(template: str, now: datetime) -> str:
    """The template with a `strftime_now` of its own, for which it is always `now`; one that does not ask, as it is.

    transformers gives templates a `strftime_now` of today and lets nobody replace it.
    """
    if not reads(template, NOW):
        return template
    values = {f"%{flag}{letter}": now.strftime(f"%{flag}{letter}") for letter in _DIRECTIVES for flag in ("", "-")}
    return _CLOCK.replace("VALUES", repr(values)) + template

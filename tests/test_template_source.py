"""What a template's source tells, and the clock that is put before it."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import chat_templates
import pytest
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pagedbatch.input.chat.template_source import reads, variables_of, with_clock

NOW = datetime(2024, 2, 9, 7, 5, 3)


def _render(template: str, **variables: Any) -> str:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals["strftime_now"] = lambda _: "the clock on the wall"
    return environment.from_string(template).render(**variables)


@pytest.mark.parametrize(
    "directives",
    ["%d %b %Y", "%Y-%m-%d", "%A, %-d %B %Y, %I:%M %p", "%%d %% 100%%", "%H:%M:%S", 'it\'s "%d"', "", "%%%d", "%j%n%y"],
)
def test_the_clock_tells_time_as_strftime_does(directives: str) -> None:
    assert _render(with_clock("{{ strftime_now(f) }}", NOW), f=directives) == NOW.strftime(directives)


@pytest.mark.parametrize(
    "beginning", ["", "\n", "\n\n  ", "  {% if true %}x{% endif %}\n", "{#- c -#}\n a", "\n{%- if true %} b{% endif %}"]
)
def test_what_stands_before_the_template_changes_nothing_in_it(beginning: str) -> None:
    template = beginning + "{{ 'at' }} {% if strftime_now is defined %}\n{{ strftime_now('%Y') }}\n{% endif %}\n"
    assert _render(with_clock(template, NOW)) == _render(template).replace("the clock on the wall", "2024")


def test_the_clock_is_seen_in_macros_loops_and_conditions() -> None:
    template = (
        "{% macro today() %}{{ strftime_now('%d') }}{% endmacro %}{% for i in [1, 2] %}{{ today() }}{% endfor %}"
        "{% if strftime_now('%Y') == '2024' %}{% set year = strftime_now('%Y') %}{{ year }}{% endif %}"
    )
    assert _render(with_clock(template, NOW)) == "09092024"


def test_a_template_that_does_not_ask_is_left_alone() -> None:
    assert with_clock(chat_templates.QWEN3, NOW) == chat_templates.QWEN3


def test_what_a_template_reads() -> None:
    assert (variables_of(chat_templates.LLAMA3_2) or set()) >= {
        "bos_token", "date_string", "strftime_now", "messages", "tools", "add_generation_prompt", "raise_exception",
    }  # fmt: skip
    source = "{% generation %}{{ a }}{% break %}{% endgeneration %}{% set b = 1 %}{{ b }}"
    assert variables_of(f"{{% for i in c %}}{source}{{% endfor %}}") == {"a", "c"}
    assert reads(chat_templates.QWEN3, "enable_thinking")
    assert not reads(chat_templates.QWEN2_5, "enable_thinking")


def test_a_template_that_cannot_be_parsed_may_read_anything() -> None:
    assert variables_of("{% if %}") is None
    assert reads("{% if %}", "tools")

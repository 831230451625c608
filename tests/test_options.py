"""The table of options: what is made from it, and that everything made from it is whole."""

from __future__ import annotations

import runpy
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from pagedbatch.errors import ParamError, UsageError
from pagedbatch.options import GROUPS
from pagedbatch.params import GENERATION_OPTIONS, READERS, GenerationParams
from pagedbatch.settings import OPTIONS, RUN_OPTIONS, RunSettings

DOCS = Path(__file__).resolve().parent.parent / "docs"


def test_the_page_of_options_is_up_to_date() -> None:
    page = runpy.run_path(str(DOCS / "make_options.py"))["page"]()
    assert (DOCS / "options.md").read_text(encoding="utf-8") == page, "docs/options.md is out of date: make docs"


def test_every_field_is_an_option() -> None:
    assert {each.name for each in fields(GenerationParams)} == GENERATION_OPTIONS.keys() == READERS.keys()
    assert {each.name for each in fields(RunSettings)} == {*RUN_OPTIONS, "generation", "origins", "started"}
    assert OPTIONS.keys() == GENERATION_OPTIONS.keys() | RUN_OPTIONS.keys()
    assert not GENERATION_OPTIONS.keys() & RUN_OPTIONS.keys()


def test_options_stand_in_the_order_of_their_groups() -> None:
    assert list(dict.fromkeys(each.group for each in OPTIONS.values())) == list(GROUPS)


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_says_what_it_is(name: str) -> None:
    option = OPTIONS[name]
    assert option.help.endswith("."), "whole sentences"
    assert option.read.accepts
    assert bool(option.metavar or option.read.metavar) == (option.read.flag_type is not bool)


@pytest.mark.parametrize("name", [name for name, each in OPTIONS.items() if not each.is_required])
def test_a_default_is_a_value_that_may_be_given(name: str) -> None:
    option = OPTIONS[name]
    if option.default not in (None, ()):
        assert option.read(name, option.default) == option.default


@pytest.mark.parametrize("name", [name for name, each in OPTIONS.items() if each.read.choices])
def test_every_choice_is_taken_and_nothing_else(name: str) -> None:
    for choice in OPTIONS[name].read.choices:
        OPTIONS[name].read(name, choice)
    with pytest.raises(ParamError, match=f"^{name} must be "):
        OPTIONS[name].read(name, "none of them")


@pytest.mark.parametrize(
    ("name", "shown"),
    [("max_line_bytes", "64MiB"), ("swap_space", "1GiB"), ("prefix_cache", "on"), ("strict", "off"), ("top_p", "1"),
     ("early_stopping", "false"), ("stop", ""), ("regex", ""), ("best_of", "n"), ("model", "")],
)  # fmt: skip
def test_a_default_is_shown_as_it_is_typed(name: str, shown: str) -> None:
    assert OPTIONS[name].shown_default == shown


@pytest.mark.parametrize(
    ("typed", "meant"),
    [(r"a\nb", "a\nb"), (r"a\tb", "a\tb"), (r"a\\nb", r"a\nb"), ("a\nb", "a\nb"), (r"\d\x", r"\d\x")],
)
def test_escapes_on_the_command_line(typed: str, meant: str) -> None:
    assert OPTIONS["stop"].typed([typed]) == OPTIONS["bad_words"].typed([typed]) == [meant]
    assert OPTIONS["prompt_template"].typed(typed) == meant
    assert OPTIONS["regex"].typed(typed) == typed


@pytest.mark.parametrize(("name", "typed"), [("stop", []), ("stop", None), ("keep", []), ("logit_bias", None)])
def test_what_was_not_typed_is_not_given(name: str, typed: Any) -> None:
    assert OPTIONS[name].typed(typed) is None


def test_json_on_the_command_line() -> None:
    assert OPTIONS["logit_bias"].typed('{"5": 1}') == {"5": 1}
    with pytest.raises(UsageError, match=r"^--chat-template-kwargs: malformed JSON: .* at column 2$"):
        OPTIONS["chat_template_kwargs"].typed("{a}")

"""Which constraint a row gets, and what is refused before anything runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engines import tokenizer
from models import EOS, EOT

from pagedbatch.constraint import Constraint
from pagedbatch.constraints.build import CatalogSource, ConstraintBuilder, GrammarSource, read_run_constraint
from pagedbatch.constraints.catalog_source import read_catalog
from pagedbatch.errors import RowError, UsageError
from pagedbatch.input.requests import ModelLimits, PromptBuilder
from pagedbatch.input.row import RawRow, place_row
from pagedbatch.params import GenerationParams
from pagedbatch.settings import RunSettings, merge

PARAMS = GenerationParams(max_tokens=20)


def settings(**given: Any) -> RunSettings:
    return merge({"input": "in", "model": "m", "output": "out", **given}, {})


def first_tokens(path: Path, constraint: Constraint | None) -> str:
    """What may be written first, as text."""
    assert constraint is not None
    token_ids = constraint.start().allowed().token_ids  # type: ignore[union-attr]
    return "".join(sorted(tokenizer(path).convert_ids_to_tokens(token_ids.tolist())))


@pytest.fixture
def builder(table_model_path: Path) -> ConstraintBuilder:
    """One letter a token; the run's catalog is `cf` and `b`."""
    run = CatalogSource(["cf", "b"], "--constrain-to items.txt")
    return ConstraintBuilder(tokenizer(table_model_path), 64, frozenset({EOS}), run)


def refusal(builder: ConstraintBuilder, fields: dict[str, Any], params: GenerationParams = PARAMS) -> str:
    with pytest.raises(RowError) as refused:
        builder.constraint(fields, params)
    assert "\n" not in str(refused.value)
    return str(refused.value)


# --- files -----------------------------------------------------------------------------------------------------------


def test_a_catalog_file(tmp_path: Path) -> None:
    """Texts as they stand, BOM, CRLF and blank lines, token ids; what only looks like a list is text."""
    file = tmp_path / "items.txt"
    file.write_bytes("\ufeffParis\r\n Rome\n\n[5, 6]\n[a]\n[\n[]\n[1.5]\né 中".encode())
    assert read_catalog(str(file)) == ["Paris", " Rome", "", [5, 6], "[a]", "[", "[]", "[1.5]", "é 中"]


def test_where_a_run_constraint_comes_from(tmp_path: Path) -> None:
    schema = {"type": "integer"}
    (tmp_path / "schema.json").write_text(json.dumps(schema, indent=2))
    (tmp_path / "rules.ebnf").write_text('root ::= "a"\n')
    by_file, by_text, by_table = (
        read_run_constraint(settings(json_schema=given))
        for given in (str(tmp_path / "schema.json"), json.dumps(schema), schema)
    )
    assert by_file == by_text == by_table == GrammarSource("json_schema", '{"type": "integer"}', "--json-schema")
    assert read_run_constraint(settings(regex="a+")) == GrammarSource("regex", "a+", "--regex")
    grammar = read_run_constraint(settings(grammar=str(tmp_path / "rules.ebnf")))
    assert grammar == GrammarSource("grammar", 'root ::= "a"\n', "--grammar")
    assert read_run_constraint(settings()) is None


def test_a_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    for name, text in (("one", "a\nb\n"), ("two", "a\nb\n"), ("three", "a\nc\n")):
        (tmp_path / name).write_text(text)
    one, two, three = (
        read_run_constraint(settings(constrain_to=str(tmp_path / name))) for name in ("one", "two", "three")
    )
    assert one is not None
    assert two is not None
    assert three is not None
    assert one.fingerprint == two.fingerprint != three.fingerprint


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"constrain_to": "nowhere.txt"}, "--constrain-to nowhere.txt: No such file"),
        ({"grammar": "nowhere.ebnf"}, "--grammar nowhere.ebnf: No such file"),
        ({"json_schema": "nowhere.json"}, "--json-schema nowhere.json: No such file"),
        ({"json_schema": "{'a'"}, "--json-schema: malformed JSON"),
        ({"json_schema": '{"not": {}}'}, "--json-schema: outputs can't be held to 'not' at #"),
        ({"regex": "a", "constrain_to": "x"}, "--constrain-to and --regex can't be combined"),
    ],
)
def test_a_run_constraint_that_cannot_be_read(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError) as refused:
        read_run_constraint(settings(**given))
    assert str(refused.value).startswith(reason)


def test_a_catalog_without_items_or_not_in_utf_8(tmp_path: Path) -> None:
    for content, reason in ((b"\n\r\n", "no item in it"), ("é".encode("latin-1"), "not UTF-8")):
        (tmp_path / "items.txt").write_bytes(content)
        with pytest.raises(UsageError, match=reason):
            read_run_constraint(settings(constrain_to=str(tmp_path / "items.txt")))


def test_the_command_line_overrides_the_recipe_whatever_the_kind() -> None:
    base = {"input": "in", "model": "m", "output": "out"}
    merged = merge({**base, "regex": "a"}, {"constrain_to": "items.txt"})
    assert (merged.regex, merged.constrain_to) == ("a", None)


# --- rows ------------------------------------------------------------------------------------------------------------


def test_a_row_has_the_runs_constraint_or_its_own(table_model_path: Path, builder: ConstraintBuilder) -> None:
    assert first_tokens(table_model_path, builder.constraint({}, PARAMS)) == "bc"
    own = builder.constraint({"allowed_outputs": ["d", [4, 5]]}, PARAMS)
    assert first_tokens(table_model_path, own) == "ad"
    assert builder.constraint({}, replace(PARAMS, max_tokens=0)) is None
    free = ConstraintBuilder(tokenizer(table_model_path), 64, frozenset({EOS}), None)
    assert free.constraint({"prompt": "a"}, PARAMS) is None


def test_room_is_asked_for_the_longest_item_only(table_model_path: Path) -> None:
    """Four beams of 200 tokens each would not be let into a small pool."""
    row = place_row(RawRow({"prompt": "a", "allowed_outputs": ["cf", "cfgh"], "num_beams": 4}), 0)
    limits = ModelLimits(256, 64, frozenset({EOS}))
    for run, fitted in ((200, len("cfgh") + 1), (3, 3)):
        prompts = PromptBuilder(
            tokenizer(table_model_path), limits, model_defaults={}, run_settings={"max_tokens": run}
        )
        assert prompts.request(row).params.max_tokens == fitted


def test_rows_that_list_the_same_share_a_trie(builder: ConstraintBuilder) -> None:
    one, two, other = (
        builder.constraint({"allowed_outputs": given}, PARAMS) for given in (["d", [4]], ["d", [4]], ["e"])
    )
    assert one.trie is two.trie is not other.trie  # type: ignore[union-attr]
    assert builder.constraint({}, PARAMS).trie is builder.constraint({}, PARAMS).trie  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"allowed_outputs": "d"}, "allowed_outputs must be a list"),
        ({"allowed_outputs": []}, "allowed_outputs must be a list of at least one"),
        ({"allowed_outputs": ["d", ""]}, "allowed_outputs[1] must be a text or a list of token ids"),
        ({"allowed_outputs": ["d", [True]]}, "allowed_outputs[1] must be a text or a list of token ids"),
        (
            {"allowed_outputs": ["d", [64]]},
            "allowed_outputs[1]: 64 is no token id of this model, whose last one is 63",
        ),
        ({"allowed_outputs": ["d", [-1]]}, "allowed_outputs[1]: -1 is no token id"),
        ({"allowed_outputs": ["é"]}, "allowed_outputs[0]: this model has no tokens for 'é'"),
        ({"allowed_outputs": ["\ud800"]}, "allowed_outputs[0]: this model has no tokens for"),
        ({"allowed_outputs": [[4, EOS]]}, "allowed_outputs[0]: [4, 2] holds the end token 2"),
        ({"allowed_outputs": ["d"], "regex": "d"}, "allowed_outputs and regex are given: a row takes one of them"),
        ({"regex": 5}, "regex must be a non-empty text, got 5"),
        ({"grammar": ""}, "grammar must be a non-empty text"),
        ({"json_schema": 5}, "json_schema must be a JSON schema, got 5"),
        ({"json_schema": "{"}, "json_schema: malformed JSON"),
        ({"json_schema": {"properties": {"a": {"not": {}}}}}, "outputs can't be held to 'not' at #/properties/a"),
    ],
)
def test_a_rows_own_constraint_is_checked(builder: ConstraintBuilder, fields: dict[str, Any], reason: str) -> None:
    assert reason in refusal(builder, fields)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"stop": ("x",)}, "can't be combined with stop"),
        ({"ignore_eos": True}, "can't be combined with ignore_eos"),
        ({"max_tokens": 1}, "no item fits max_tokens 1 and min_tokens 0: with its end token the shortest takes 2"),
        ({"min_tokens": 3}, "no item fits max_tokens 20 and min_tokens 3"),
        ({"stop_token_ids": (5,)}, "an item holds token 5, which stop_token_ids says ends an output"),
    ],
)
def test_what_cannot_be_combined(builder: ConstraintBuilder, given: dict[str, Any], reason: str) -> None:
    assert refusal(builder, {}, replace(PARAMS, **given)).startswith("--constrain-to items.txt")
    assert reason in refusal(builder, {}, replace(PARAMS, **given))


def test_stop_token_ids_end_an_item_too(table_model_path: Path, builder: ConstraintBuilder) -> None:
    constraint = builder.constraint({}, replace(PARAMS, stop_token_ids=(EOT,)))
    assert constraint is not None
    state = constraint.start()
    state.advance(5)
    assert state.allowed().token_ids.tolist() == [EOS, EOT]  # type: ignore[union-attr]
    endless = ConstraintBuilder(tokenizer(table_model_path), 64, frozenset(), CatalogSource(["b"], "--constrain-to x"))
    assert "names none: give stop_token_ids" in refusal(endless, {})
    assert endless.constraint({}, replace(PARAMS, stop_token_ids=(EOT,))) is not None


def test_the_line_of_an_item_that_cannot_be_written(table_model_path: Path) -> None:
    run = CatalogSource(["b", "", "cf", "zé"], "--constrain-to items.txt")
    broken = ConstraintBuilder(tokenizer(table_model_path), 64, frozenset({EOS}), run)
    assert refusal(broken, {}) == "--constrain-to items.txt, line 4: this model has no tokens for 'zé'"


@pytest.mark.parametrize(
    "schema",
    [{"type": b"\xff"}, {"enum": ["a"], "type": [[]]}, '{"a":' * 5000 + "1" + "}" * 5000],
    ids=["bytes", "type", "depth"],
)
def test_a_schema_that_is_no_json_is_the_rows_error(builder: ConstraintBuilder, schema: Any) -> None:
    """A table may hold bytes, and a text any depth."""
    assert refusal(builder, {"json_schema": schema}).startswith("json_schema")

"""Grammars compiled for a model's vocabulary: what a state allows, its forks, and what is refused."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import paged_model, tokenizer
from models import EOS, EOT, SPECIAL_TOKENS

from pagedbatch.constraints.grammar import GrammarCompiler, GrammarState
from pagedbatch.errors import RowError, RunError

pytest.importorskip("xgrammar", reason="xgrammar is not installed")

ENDS = (EOS, EOT)


@pytest.fixture(scope="module")
def compiler(rand_model_path: Path) -> GrammarCompiler:
    return GrammarCompiler(tokenizer(rand_model_path), paged_model(rand_model_path).config.vocab_size, ENDS)


@pytest.fixture(scope="module")
def byte_ids(rand_model_path: Path) -> list[int]:
    """The token of each byte."""
    ids = tokenizer(rand_model_path).convert_tokens_to_ids
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return [ids(chr(byte) if byte in visible else chr(256 + hidden.index(byte))) for byte in range(256)]


def allowed(state: GrammarState) -> list[int]:
    words = state.allowed().words
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


def write(state: GrammarState, text: str, byte_ids: list[int]) -> GrammarState:
    for byte in text.encode():
        assert byte_ids[byte] in allowed(state)
        state.advance(byte_ids[byte])
    return state


def test_what_may_come_next(compiler: GrammarCompiler, byte_ids: list[int]) -> None:
    state = compiler.constraint("regex", "[a-c]x?", ENDS).start()
    assert allowed(state) == [byte_ids[byte] for byte in b"abc"]
    write(state, "b", byte_ids)
    assert allowed(state) == [*ENDS, byte_ids[ord("x")]]
    write(state, "x", byte_ids)
    assert allowed(state) == list(ENDS)
    with pytest.raises(RunError, match="not allow it here"):
        state.advance(byte_ids[ord("x")])


def test_special_tokens_are_no_text(compiler: GrammarCompiler, byte_ids: list[int]) -> None:
    """They are left out of the output: `<bos>` has to be written in letters."""
    for ends in (ENDS, (EOS,), (EOT,)):
        state = compiler.constraint("regex", ".*", ends).start()
        assert set(allowed(state)) & set(range(len(SPECIAL_TOKENS))) == set(ends)
    write(compiler.constraint("regex", "<bos>", ENDS).start(), "<bos>", byte_ids)


def test_a_token_that_ends_is_no_text(compiler: GrammarCompiler, byte_ids: list[int]) -> None:
    """With b as an end token: it closes what is complete, and never stands in the middle."""
    b = byte_ids[ord("b")]
    state = compiler.constraint("regex", "a[bc]*", (b,)).start()
    assert allowed(state) == [byte_ids[ord("a")]]
    write(state, "a", byte_ids)
    assert allowed(state) == [b, byte_ids[ord("c")]]
    with pytest.raises(RowError, match="no output at all"):
        compiler.constraint("regex", "b", (b,))


def test_a_fork_goes_on_by_itself(compiler: GrammarCompiler, byte_ids: list[int]) -> None:
    parent = write(compiler.constraint("grammar", 'root ::= "[" root "]" | "x"\n', ENDS).start(), "[[", byte_ids)
    child = parent.fork()
    write(child, "x]]", byte_ids)
    assert allowed(child) == list(ENDS)
    assert allowed(parent) == sorted(byte_ids[byte] for byte in b"[x")
    write(parent, "[x]]]", byte_ids)
    assert allowed(parent) == list(ENDS)


@pytest.mark.parametrize("schema", [{"type": "string"}, {"type": "string", "maxLength": 9}, {}], ids=json.dumps)
def test_no_control_character_in_a_json_string(
    compiler: GrammarCompiler, byte_ids: list[int], schema: dict[str, Any]
) -> None:
    state = write(compiler.constraint("json_schema", json.dumps(schema), ENDS).start(), '"é', byte_ids)
    assert not set(allowed(state)) & {byte_ids[byte] for byte in range(32)}


def test_blanks_between_json_parts_end(compiler: GrammarCompiler, byte_ids: list[int]) -> None:
    state = compiler.constraint("json_schema", '{"type": "array"}', ENDS).start()
    write(state, "[\n" + 9 * " ", byte_ids)
    assert not set(allowed(state)) & {byte_ids[byte] for byte in b" \n\t\r"}
    write(state, "]", byte_ids)


def test_a_grammar_is_compiled_once(compiler: GrammarCompiler) -> None:
    first, again = (compiler.constraint("regex", "once+", ends) for ends in (ENDS, (EOS,)))
    assert first.compiled is again.compiled
    assert compiler.constraint("grammar", 'root ::= "once"\n', ENDS).compiled is not first.compiled


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}', "minimum greater than maximum"),
        ("json_schema", "false", "cannot accept any value"),
        ("json_schema", '{"enum": []}', "enum array must not be empty"),
        ("json_schema", '{"type": "nothing"}', "Unsupported type"),
        ("regex", "(", "parenthesis is not closed"),
        ("regex", "a(?=b)", "Lookahead is not supported"),
        ("regex", r"[^\x00-\U0010ffff]", "allows no output at all"),
        ("grammar", 'start ::= "a"', 'root rule with name "root" is not found'),
        ("grammar", "root ::= root", "allows no output at all"),
    ],
)
def test_what_cannot_be_had_is_refused_in_one_line(
    compiler: GrammarCompiler, kind: Any, text: str, reason: str
) -> None:
    with pytest.raises(RowError) as refused:
        compiler.constraint(kind, text, ENDS)
    message = str(refused.value)
    assert reason in message
    assert "\n" not in message
    assert ".cc" not in message


def test_without_xgrammar_there_is_a_hint(rand_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "xgrammar":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(RowError, match=r"pip install 'pagedbatch\[grammar\]'"):
        GrammarCompiler(tokenizer(rand_model_path), 272, ENDS)

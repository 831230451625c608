"""Grammars inside the engine: beams, samples and greedy rows on a model, and what must not change them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from constrained_runs import encode, ends_of, run_one
from engines import paged_model, run_engine, tokenizer

from pagedbatch.constraint import Constraint
from pagedbatch.params import GenerationParams
from pagedbatch.sequence import Request

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z 中]{0,4}$"},
        "kind": {"enum": ["é", "中", "😀"]},
        "counts": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 2},
    },
    "required": ["name", "kind", "counts"],
}
REGEX = r"[a-c]{2,4}-(x|yy)\d{1,3}"
EBNF = 'root ::= term (("+" | "*") term){0,2}\nterm ::= [0-9]{1,2} | "(" root ")"\n'


def parses_as_schema(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["name", "kind", "counts"]
        and re.fullmatch("[a-z 中]{0,4}", value["name"]) is not None
        and value["kind"] in ("é", "中", "😀")
        and len(value["counts"]) <= 2
        and all(type(count) is int and 0 <= count <= 99 for count in value["counts"])
    )


def parses_as_sum(text: str) -> bool:
    return re.fullmatch(r"[0-9+*()]+", text) is not None and isinstance(eval(re.sub(r"\b0+(?=\d)", "", text)), int)


PARSERS: dict[tuple[str, str], Callable[[str], bool]] = {
    ("json_schema", json.dumps(SCHEMA)): parses_as_schema,
    ("regex", REGEX): lambda text: re.fullmatch(REGEX, text) is not None,
    ("grammar", EBNF): parses_as_sum,
}


@cache
def grammar(path: Path, kind: Any, text: str) -> Constraint:
    pytest.importorskip("xgrammar", reason="xgrammar is not installed")
    from pagedbatch.constraints.grammar import GrammarCompiler

    ends = tuple(sorted(ends_of(path)))
    vocab_size = paged_model(path).config.vocab_size
    return GrammarCompiler(tokenizer(path), vocab_size, ends).constraint(kind, text, ends)


@pytest.mark.parametrize(("kind", "text"), PARSERS, ids=lambda value: value if len(value) < 12 else "")
@pytest.mark.parametrize(
    ("params", "num_rows"),
    [
        (GenerationParams(n=4, temperature=1.0, max_tokens=400), 100),
        (GenerationParams(num_beams=4, n=4, max_tokens=400), 10),
        (GenerationParams(max_tokens=400), 10),
    ],
    ids=["samples", "beams", "greedy"],
)
def test_outputs_parse(rand_model_path: Path, kind: str, text: str, params: GenerationParams, num_rows: int) -> None:
    """The model writes noise by itself; so whatever parses was made to."""
    constraint = grammar(rand_model_path, kind, text)
    prompts = [[1, *encode(rand_model_path, f"row {row}")] for row in range(num_rows)]
    requests = [Request(row, prompt, params, row, constraint=constraint) for row, prompt in enumerate(prompts)]
    run = run_engine(rand_model_path, requests, num_blocks=6000)
    outputs = [output for row in range(num_rows) for output in run.outputs[row].outputs]
    assert len(outputs) == num_rows * params.n
    assert {output.finish_reason for output in outputs} == {"stop"}
    texts = [tokenizer(rand_model_path).decode(output.token_ids, skip_special_tokens=True) for output in outputs]
    assert [written for written in texts if not PARSERS[kind, text](written)] == []
    assert len(set(texts)) > num_rows // 2


def test_beams_of_a_grammar_equal_the_catalog_of_its_texts(rand_model_path: Path) -> None:
    """Two ways to say the same: 4 * 3 texts, each with either end token."""
    constraint = grammar(rand_model_path, "regex", "[a-d](x|yy|)")
    params = GenerationParams(num_beams=24, n=24, max_tokens=9)
    prompt = [1, *encode(rand_model_path, "which?")]
    run = run_engine(rand_model_path, [Request(0, prompt, params, constraint=constraint)])
    items = [encode(rand_model_path, a + b) for a in "abcd" for b in ("x", "yy", "")]
    expected = run_one(rand_model_path, prompt, params, items)
    assert run.token_ids() == expected.token_ids()
    assert len(run.outputs[0].outputs) == 24


def test_a_grammar_under_preemption(rand_model_path: Path) -> None:
    """Recomputed or swapped, a sequence goes on where its matcher stands."""
    constraint = grammar(rand_model_path, "regex", r"([ab]{10}-[cd]{10},){3}")
    params = [GenerationParams(num_beams=4, n=4, max_tokens=70), GenerationParams(n=4, temperature=1.0, max_tokens=70)]
    requests = [Request(i, [1, 10 + i, 11], params[i % 2], i, constraint=constraint) for i in range(6)]
    roomy = run_engine(rand_model_path, requests)
    tight = run_engine(rand_model_path, requests, num_blocks=26, preemption="recompute")
    assert tight.counters.preemptions_recompute > 2
    assert tight.token_ids() == roomy.token_ids()
    assert {len(ids) for outputs in roomy.token_ids().values() for ids in outputs} == {67}

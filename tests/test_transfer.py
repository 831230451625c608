"""Requests that cross from one process to another: equal on the other side, and what rows share crosses once."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from pagedbatch.constraints.build import CatalogSource, ConstraintSource, GrammarSource
from pagedbatch.input.preparation.transfer import RequestReceiver, RequestSender
from pagedbatch.input.requests import ModelLimits, PromptBuilder
from pagedbatch.input.row import RawRow, place_row
from pagedbatch.sequence import Request

END = 2


class Sides:
    """A builder whose requests are sent and received, as if by two processes with the same run constraint."""

    def __init__(self, tokenizer: Any, run: ConstraintSource | None = None) -> None:
        self.builders = [
            PromptBuilder(
                tokenizer,
                ModelLimits(64, len(tokenizer), frozenset([END])),
                model_defaults={},
                run_settings={},
                run_constraint=run,
            )
            for _ in range(2)
        ]
        sending, receiving = (each.constraints for each in self.builders)
        for each in self.builders:
            each.constraint({}, each.resolve_params({}))
        self.sender = RequestSender(sending.run_part(), sending)
        self.receiver = RequestReceiver(receiving.run_part(), receiving)
        self.sizes: list[int] = []

    def cross(self, **fields: Any) -> tuple[Request, Request]:
        request = self.builders[0].request(place_row(RawRow(fields, line=1), 3))
        payload = self.sender.dumps(request)
        self.sizes.append(len(payload))
        return request, self.receiver.loads(payload)


@pytest.fixture(scope="module")
def tokenizer(rand_model_path: Path) -> Any:
    from pagedbatch.model.tokenizer import load_tokenizer

    return load_tokenizer(str(rand_model_path))


def walk(request: Request, seed: int) -> list[tuple[int, list[int]]]:
    """Tokens that a random output takes, and how many were allowed before each."""
    import numpy as np

    assert request.constraint is not None
    draw, state = random.Random(seed), request.constraint.start()
    taken = []
    for _ in range(30):
        allowed: Any = state.allowed()
        ids = getattr(allowed, "token_ids", None)
        if ids is None:
            ids = np.flatnonzero(np.unpackbits(allowed.words.view(np.uint8), bitorder="little"))
        token_id = int(draw.choice(list(ids)))
        taken.append((token_id, sorted(map(int, ids))))
        if token_id == END:
            break
        state.advance(token_id)
    return taken


def test_a_request_is_the_same_on_the_other_side(tokenizer: Any) -> None:
    sides = Sides(tokenizer)
    for fields in ({}, {"n": 2, "temperature": 1, "stop": ["x"]}, {"priority": 4, "logit_bias": {"7": 1.5}}, {}):
        sent, received = sides.cross(prompt="abc", **fields)
        assert sent == received
    assert sides.sizes[3] < sides.sizes[0]


def test_parameters_that_went_are_sent_again(tokenizer: Any) -> None:
    sides = Sides(tokenizer)
    for seed in [*range(40), *range(40), 39, 39, 1]:
        sent, received = sides.cross(prompt="abc", seed=seed)
        assert sent == received


def test_a_list_of_outputs_crosses_once_while_both_sides_keep_it(tokenizer: Any) -> None:
    sides = Sides(tokenizer)
    lists = [[f"{i} output {j}" for j in range(50)] for i in range(70)]
    for i in [0, 0, 1, 0, *range(70), 69, 0]:
        sent, received = sides.cross(prompt="a", allowed_outputs=lists[i])
        assert walk(sent, i) == walk(received, i)
    first, again, other, third = sides.sizes[:4]
    assert again < first / 5
    assert third == again
    assert other > 5 * again
    assert sides.sizes[-2] <= again + 2  # kept
    assert sides.sizes[-1] > 5 * again  # gone on both sides


def test_the_runs_own_catalog_does_not_cross(tokenizer: Any) -> None:
    sides = Sides(tokenizer, CatalogSource([f"item {i}" for i in range(5000)], "--constrain-to x"))
    sent, received = sides.cross(prompt="a")
    assert walk(sent, 1) == walk(received, 1)
    assert sides.sizes[0] < 1500
    trie: Any = received.constraint
    assert trie.trie is sides.builders[1].constraints.run_part()


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}},
    },
    "required": ["name", "tags"],
}


@pytest.mark.parametrize("quick_seconds", [0.0, 1e9])
@pytest.mark.parametrize(
    "fields", [{"json_schema": SCHEMA}, {"regex": "[a-c]{2,5}(x|yy)*"}, {"grammar": 'root ::= "a" root | "b"'}]
)
def test_a_grammar_allows_the_same_on_the_other_side(
    tokenizer: Any, fields: dict[str, Any], quick_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sent as it was compiled, and compiled there again."""
    pytest.importorskip("xgrammar")
    monkeypatch.setattr("pagedbatch.constraints.grammar._QUICK_SECONDS", quick_seconds)
    sides = Sides(tokenizer)
    for seed in range(10):
        sent, received = sides.cross(prompt="a", **fields)
        assert walk(sent, seed) == walk(received, seed)
    assert len(set(sides.sizes[1:])) == 1
    assert sides.sizes[1] < sides.sizes[0]


def test_the_runs_own_grammar_does_not_cross(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xgrammar")
    monkeypatch.setattr("pagedbatch.constraints.grammar._QUICK_SECONDS", 0.0)
    sides = Sides(tokenizer, GrammarSource("regex", "[a-f]+", "--regex"))
    sent, received = sides.cross(prompt="a")
    assert walk(sent, 0) == walk(received, 0)
    grammar: Any = received.constraint
    assert grammar.compiled is sides.builders[1].constraints.run_part()

"""Thinking budgets in the engine: the part is closed in time, and nothing of it depends on how a step is scheduled."""

from __future__ import annotations

import pickle
import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from fake_runs import EOS, fake_run
from fake_runs import request as fake_request
from hypothesis import given
from hypothesis import strategies as st

from pagedbatch.constraint import AllowedIds, AllowedMask
from pagedbatch.constraints.catalog import CatalogConstraint, TokenTrie, pack
from pagedbatch.constraints.thinking import TagMatcher, ThinkingConstraint
from pagedbatch.sequence import Request

#: Tags of one token and of several, in a vocabulary of eleven.
OPENINGS, CLOSINGS = {1: (9,), 3: (8, 9, 8)}, {1: (10,), 3: (7, 10, 7)}
VOCABULARY = 11


def _matcher(token_ids: tuple[int, ...]) -> TagMatcher:
    """Of a tag whose tokens are a byte each."""
    return TagMatcher(bytes(token_ids), token_ids, {i: bytes([i]) for i in token_ids})


def _thinking(
    budget: int, *, tag_size: int = 1, is_open: bool = True, items: list[tuple[int, ...]] | None = None
) -> ThinkingConstraint:
    answer = None if items is None else CatalogConstraint(TokenTrie.build(map(pack, items)), (EOS,), 0, 12)
    opening, closing = _matcher(OPENINGS[tag_size]), _matcher(CLOSINGS[tag_size])
    return ThinkingConstraint(budget, opening, closing, is_open, answer, VOCABULARY, (EOS,))


def _find(token_ids: list[int], tag: tuple[int, ...], start: int = 0) -> int:
    """Where a tag begins, or -1."""
    places = range(start, len(token_ids) - len(tag) + 1)
    return next((i for i in places if tuple(token_ids[i : i + len(tag)]) == tag), -1)


def thought(token_ids: list[int], constraint: ThinkingConstraint) -> list[int] | None:
    """The tokens of an output's thinking part; None where it has none."""
    begin = 0
    if not constraint.is_open:
        begin = _find(token_ids, constraint.opening.token_ids)
        if begin < 0:
            return None
        begin += len(constraint.opening.token_ids)
    end = _find(token_ids, constraint.closing.token_ids, begin)
    return token_ids[begin : len(token_ids) if end < 0 else end]


def requests(tag_size: int, is_open: bool, items: list[tuple[int, ...]] | None) -> list[Request]:
    kinds: list[dict[str, Any]] = [
        {"num_beams": 5, "n": 5},
        {"n": 6},
        {},
        {"num_beams": 6, "n": 3, "num_beam_groups": 3, "diversity_penalty": 0.4},
    ]
    made = []
    for row in range(16):
        constraint = _thinking(row % 5, tag_size=tag_size, is_open=is_open, items=items)
        request = fake_request(row, 6 + row % 5, max_tokens=24, ignore_eos=items is None, **kinds[row % 4])
        made.append(replace(request, constraint=constraint))
    return made


ITEMS = [(1, 2), (1, 2, 3, 4), (5, 6, 1), (9, 10, 3), (4,), (3, 3)]


@pytest.mark.parametrize("items", [None, ITEMS], ids=["free", "catalog"])
@pytest.mark.parametrize("is_open", [True, False], ids=["open", "opens"])
@pytest.mark.parametrize("tag_size", [1, 3])
def test_no_part_is_longer_than_its_budget(tag_size: int, is_open: bool, items: list[tuple[int, ...]] | None) -> None:
    made = requests(tag_size, is_open, items)
    run = fake_run(made)
    used_up, closed_early = 0, 0
    for request in made:
        constraint = request.constraint
        assert isinstance(constraint, ThinkingConstraint)
        outputs = run.outputs[request.request_id].outputs
        assert len(outputs) == request.params.n or request.params.num_beam_groups > 1
        for output in outputs:
            part = thought(output.token_ids, constraint)
            if part is None:
                assert not is_open
                assert items is None
                continue
            assert len(part) <= constraint.budget
            used_up += len(part) == constraint.budget
            closed_early += len(part) < constraint.budget
            if items is not None:
                begin = 0 if is_open else len(constraint.opening.token_ids)
                answer = output.token_ids[begin + len(part) + tag_size :]
                assert tuple(answer[:-1]) in ITEMS
                assert answer[-1] == EOS
            else:
                assert len(output.token_ids) == 24
    is_rare = tag_size == 3 and not is_open and items is None  # three tokens in a row by chance
    assert used_up > 10 or is_rare
    assert closed_early > 0 or tag_size == 3


@cache
def _roomy_answers(tag_size: int, is_held: bool) -> dict[int, Any]:
    return fake_run(requests(tag_size, tag_size == 1, ITEMS if is_held else None)[:10]).answers()


@pytest.mark.parametrize(
    "settings",
    [
        {"num_blocks": 48, "preemption": "recompute"},
        {"num_blocks": 48, "preemption": "swap", "num_swap_blocks": 200},
        {"max_num_seqs": 2},
        {"max_num_batched_tokens": 7},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
@pytest.mark.parametrize("items", [None, ITEMS], ids=["free", "catalog"])
def test_they_do_not_depend_on_how_they_are_scheduled(
    settings: dict[str, Any], items: list[tuple[int, ...]] | None
) -> None:
    for tag_size in (1, 3):
        made = requests(tag_size, tag_size == 1, items)[:10]
        tight = fake_run(made, **settings)
        preempted = tight.counters.preemptions_recompute + tight.counters.preemptions_swap
        assert preempted > 1 or "num_blocks" not in settings
        assert tight.answers() == _roomy_answers(tag_size, items is not None)


@given(st.integers(0, 6), st.sampled_from([1, 3]), st.booleans(), st.booleans(), st.data())
def test_a_state_depends_on_its_tokens_alone(
    budget: int, tag_size: int, is_open: bool, is_held: bool, data: st.DataObject
) -> None:
    """Forked anywhere, sent through a pickle, or taken from the start again: what may come next is the same."""
    constraint = _thinking(budget, tag_size=tag_size, is_open=is_open, items=ITEMS if is_held else None)
    state, sent = constraint.start(), pickle.loads(pickle.dumps(constraint)).start()
    history: list[int] = []
    for _ in range(data.draw(st.integers(0, 20))):
        choices = [token_id for token_id in _allowed(state) if token_id != EOS]
        if not choices:
            break
        token_id = data.draw(st.sampled_from(choices))
        history.append(token_id)
        fork = state.fork()
        state.advance(token_id)
        state, fork = (state, fork) if data.draw(st.booleans()) else (_advanced(fork, token_id), state)
        sent.advance(token_id)
        again = constraint.start()
        for earlier in history:
            again.advance(earlier)
        assert _allowed(state) == _allowed(sent) == _allowed(again) == _allowed(state.fork())
    part = thought(history, constraint)
    assert part is None or _find(history, constraint.closing.token_ids) >= 0 or len(part) <= budget + tag_size - 1


def _advanced(state: Any, token_id: int) -> Any:
    state.advance(token_id)
    return state


def _allowed(state: Any) -> list[int]:
    allowed = state.allowed()
    if allowed is None:
        return list(range(VOCABULARY))
    if isinstance(allowed, AllowedMask):
        return [i for i in range(VOCABULARY) if allowed.words[i // 32] >> i % 32 & 1]
    assert isinstance(allowed, AllowedIds)
    return sorted(allowed.token_ids.tolist())


def test_a_tag_that_has_begun_is_finished() -> None:
    """Tokens: 7, 10, 7 close. The budget ends behind 7 or 7, 10: only what is missing follows."""
    for begun in ([], [7], [7, 10], [7, 7], [1, 10]):
        state = _thinking(len(begun), tag_size=3).start()
        for token_id in begun:
            state.advance(token_id)
        written = list(begun)
        while state.forced:
            written.append(state.forced[0])
            state.advance(state.forced[0])
        assert written[-3:] == [7, 10, 7]
        assert len(written) == len(begun) + 3 - {(7,): 1, (7, 10): 2, (7, 7): 1}.get(tuple(begun), 0)


@given(
    st.lists(st.sampled_from([b"<", b"</", b"/", b"thi", b"nk", b"think", b">", b">\n", b" </", b"a", b""]), max_size=9)
)
def test_a_tag_is_found_however_tokens_cut_it(pieces: list[bytes]) -> None:
    known = [b"<", b"</", b"/", b"thi", b"nk", b"think", b">", b">\n", b" </"]
    matcher = TagMatcher(b"</think>", (1, 5, 6), dict(enumerate(known)))
    matched, text = 0, b""
    for piece in pieces:
        matched = matcher.step(matched, known.index(piece) if piece in known else 99)
        text += piece or b"?"
        if b"</think>" in text:
            assert matched == len(b"</think>")
            return
        longest = max(size for size in range(8) if text.endswith(b"</think>"[:size]))
        assert matched == longest


def test_a_greedy_row_is_what_it_was_up_to_the_forced_tag() -> None:
    rng = random.Random(0)
    for row in range(10):
        prompt = [rng.randrange(1, 7) for _ in range(5)]
        free = fake_request(row, prompt, max_tokens=20, ignore_eos=True)
        budget = row % 7
        held = replace(free, constraint=_thinking(budget))
        (was,) = fake_run([free]).outputs[row].outputs
        (output,) = fake_run([held]).outputs[row].outputs
        closes = _find(was.token_ids, (10,))
        if 0 <= closes <= budget:
            assert output.token_ids == was.token_ids
        else:
            assert output.token_ids[: budget + 1] == [*was.token_ids[:budget], 10]

"""When an output is complete, over a tokenizer whose tokens are bytes and short strings."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedbatch.engine.stopping import LENGTH, Finish, StopChecker, find_stop_string
from pagedbatch.params import GenerationParams
from pagedbatch.sequence import TokenNode

EOS, OTHER_EOS, STOP_ID = 0, 1, 2
#: Special tokens first, then pieces, then every byte.
PIECES = [b"", b"", b"", b"ab", b"abc", b"c", b" ", b"\n", b"xaby", "é".encode()] + [bytes([b]) for b in range(256)]
FIRST_BYTE = 10


def detokenize(token_ids: list[int], skip_special_tokens: bool = True) -> str:
    return b"".join(PIECES[token_id] for token_id in token_ids).decode(errors="replace")


def piece(text: str) -> int:
    return PIECES.index(text.encode())


def tokens_of(text: str) -> list[int]:
    """One token a byte."""
    return [FIRST_BYTE + byte for byte in text.encode()]


def run(token_ids: list[int], **params: Any) -> tuple[int, Finish | None]:
    """Feeds tokens until one completes the output: how many it took, and why it ended."""
    checker = StopChecker(frozenset({EOS, OTHER_EOS}), detokenize)
    resolved = GenerationParams(**{"max_tokens": 1000, **params})
    node: TokenNode | None = None
    for length, token_id in enumerate(token_ids, start=1):
        finish = checker.check(resolved, node, token_id)
        if finish is not None:
            return length, finish
        node = TokenNode(token_id, 0.0, node)
    return len(token_ids), None


def stopped(reason: str | int) -> Finish:
    return Finish("stop", reason)


@pytest.mark.parametrize("end", [EOS, OTHER_EOS, STOP_ID])
def test_each_end_token_ends_and_is_named(end: int) -> None:
    assert run([5, 5, end, 5], stop_token_ids=(STOP_ID,)) == (3, stopped(end))


def test_the_length_limit_is_the_last_reason() -> None:
    assert run([5, 5, 5, 5], max_tokens=3) == (3, LENGTH)
    assert run([5, 5, EOS], max_tokens=3) == (3, stopped(EOS))


def test_ignore_eos_ignores_the_models_end_tokens_only() -> None:
    assert run([EOS, OTHER_EOS, STOP_ID], ignore_eos=True, stop_token_ids=(STOP_ID,)) == (3, stopped(STOP_ID))
    assert run([OTHER_EOS, EOS], ignore_eos=True, stop_token_ids=(EOS,)) == (2, stopped(EOS))


def test_nothing_ends_before_min_tokens() -> None:
    ends = [EOS, STOP_ID, *tokens_of("x"), EOS, EOS]
    assert run(ends, min_tokens=4, stop_token_ids=(STOP_ID,), stop=("x",)) == (4, stopped(EOS))


@pytest.mark.parametrize(
    ("params", "count"),
    [
        ({}, 2),
        ({"ignore_eos": True}, 0),
        ({"stop_token_ids": (STOP_ID, 9)}, 4),
        ({"stop_token_ids": (STOP_ID, EOS)}, 3),
        ({"stop_token_ids": (STOP_ID, EOS), "ignore_eos": True}, 2),
    ],
)
def test_end_tokens_are_counted_once(params: dict[str, Any], count: int) -> None:
    checker = StopChecker(frozenset({EOS, OTHER_EOS}), detokenize)
    assert checker.num_end_tokens(GenerationParams(**params)) == count


@pytest.mark.parametrize(
    ("token_ids", "length"),
    [
        (tokens_of("xxabcyy"), 5),
        ([piece("ab"), piece("c"), piece("c")], 2),
        ([piece("abc")], 1),
        ([piece("ab"), piece("ab"), piece("c")], 3),
    ],
)
def test_a_stop_string_matches_across_tokens(token_ids: list[int], length: int) -> None:
    assert run(token_ids, stop=("abc",)) == (length, stopped("abc"))


def test_a_match_inside_a_token_counts() -> None:
    assert run([piece("c"), piece("xaby")], stop=("ab",)) == (2, stopped("ab"))


def test_a_character_of_many_bytes_matches_when_it_is_whole() -> None:
    assert run(tokens_of("x€y"), stop=("€",)) == (4, stopped("€"))
    assert run([*tokens_of("x\N{PILE OF POO}" * 3)], stop=("x\N{PILE OF POO}x",)) == (6, stopped("x\N{PILE OF POO}x"))


@pytest.mark.parametrize("stop", ["a" * 40, "\N{PILE OF POO}" * 10])
def test_a_long_stop_string_matches(stop: str) -> None:
    assert run(tokens_of("b" + stop + "b"), stop=(stop,)) == (len(stop.encode()) + 1, stopped(stop))


def test_a_long_stop_string_beside_a_short_one_matches() -> None:
    long = "a" * 40
    assert run(tokens_of(long), stop=("z", long)) == (40, stopped(long))


def test_a_few_tokens_that_show_nothing_do_not_hide_a_match_of_many_bytes() -> None:
    stop = "\N{PILE OF POO}" * 10
    token_ids = tokens_of("b" + stop)
    token_ids[21:21] = [STOP_ID] * 4
    assert run(token_ids, stop=(stop,)) == (45, stopped(stop))


@pytest.mark.parametrize("before", range(4))
def test_a_window_that_begins_inside_a_character_hides_no_match(before: int) -> None:
    """Some decoders show marks alone for bytes that do not begin with a whole character."""

    def marks_or_text(token_ids: list[int], skip_special_tokens: bool) -> str:
        data = b"".join(PIECES[token_id] for token_id in token_ids)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "\N{REPLACEMENT CHARACTER}" * len(data)

    checker = StopChecker(frozenset(), marks_or_text)
    params = GenerationParams(max_tokens=1000, stop=("ab",))
    node: TokenNode | None = None
    for token_id in tokens_of("\N{PILE OF POO}" * 10 + "x" * before + "a"):
        assert checker.check(params, node, token_id) is None
        node = TokenNode(token_id, 0.0, node)
    assert checker.check(params, node, tokens_of("b")[0]) == stopped("ab")


def test_the_match_that_begins_first_is_named() -> None:
    assert run([piece("xaby")], stop=("by", "ab", "y")) == (1, stopped("ab"))
    assert run([piece("xaby")], stop=("xaby", "xa")) == (1, stopped("xa"))


def test_tokens_that_show_nothing_do_not_hide_a_match() -> None:
    assert run([*tokens_of("ab"), STOP_ID, *tokens_of("c")], stop=("abc",)) == (4, stopped("abc"))


def test_a_stop_string_that_was_complete_before_min_tokens_does_not_end_the_output() -> None:
    assert run(tokens_of("a.bcdef.g"), stop=(".",), min_tokens=4) == (8, stopped("."))
    assert run(tokens_of("ab..c"), stop=("..",), min_tokens=4) == (4, stopped(".."))
    assert run(tokens_of("x€x"), stop=("€",), min_tokens=4) == (4, stopped("€"))
    assert run(tokens_of("€x"), stop=("€", "€x"), min_tokens=4) == (4, stopped("€x"))


@given(
    text=st.text("ab\né", max_size=20),
    stop=st.lists(st.text("ab\né", min_size=1, max_size=3), min_size=1, max_size=3),
    min_tokens=st.integers(0, 8),
)
def test_stop_strings_end_where_a_look_at_every_prefix_says(text: str, stop: list[str], min_tokens: int) -> None:
    token_ids = tokens_of(text)

    def shown(length: int) -> str:
        return detokenize(token_ids[:length])

    def is_new(stop_string: str, length: int) -> bool:
        """A match ends behind all that stood there before the first token that may end the output."""
        before = len(shown(max(0, min_tokens - 1)).rstrip("\N{REPLACEMENT CHARACTER}"))
        now = shown(length)
        return any(now.startswith(stop_string, at) and at + len(stop_string) > before for at in range(len(now)))

    ends = [n for n in range(max(1, min_tokens), len(token_ids) + 1) if any(is_new(each, n) for each in stop)]
    length, finish = run(token_ids, stop=tuple(stop), min_tokens=min_tokens)
    assert length == (ends[0] if ends else len(token_ids))
    assert (finish is not None) == bool(ends)


def test_the_text_is_cut_where_the_match_that_counts_begins() -> None:
    params = GenerationParams(stop=(".", "f."), min_tokens=4)
    assert find_stop_string(params, tokens_of("a.bcdef."), detokenize) == (6, "f.")
    assert find_stop_string(params, tokens_of("a.bc"), detokenize) is None

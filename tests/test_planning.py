"""The parts of a plan that need no model: which lengths are known, what is assumed of others, what is advised."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pagedbatch.params import GenerationParams
from pagedbatch.sequence import Request
from pagedbatch.tools.plan.advice import advise, best_block_size
from pagedbatch.tools.plan.forecast import Forecast
from pagedbatch.tools.plan.length_assumption import LengthAssumption, known_length, length_assumptions


def request(**params: Any) -> Request:
    return Request(0, [5] * 10, GenerationParams(**{"max_tokens": 20} | params))


def held(block_size: int, mean_live_blocks: float) -> Forecast:
    return Forecast("known", 20, block_size, 100, 30, mean_live_blocks, 8, 4.0, 8, 4.0, 0.0, 0.9, 0.0, 0, {})


@pytest.mark.parametrize(
    ("params", "known"),
    [
        ({}, None),
        ({"ignore_eos": True}, 20),
        ({"ignore_eos": True, "stop": ("x",)}, None),
        ({"ignore_eos": True, "stop_token_ids": (3,)}, None),
        ({"min_tokens": 20, "stop": ("x",)}, 20),
        ({"min_tokens": 19}, None),
    ],
)
def test_a_length_is_known_where_nothing_ends_an_output_before_its_limit(params: Any, known: int | None) -> None:
    assert known_length(request(**params)) == known


def test_outputs_are_as_long_as_assumed_within_their_limits() -> None:
    mixed = [request(n=2, temperature=1.0), request(min_tokens=7), request(ignore_eos=True), request(max_tokens=3)]

    def lengths(assumption: LengthAssumption) -> list[tuple[int, ...]]:
        return [each.lengths for each in assumption.script(mixed)]

    shortest, block, likely, longest = length_assumptions(mixed, block_size=16, expect_tokens=10)
    assert lengths(shortest) == [(1, 1), (7,), (20,), (1,)]
    assert lengths(block) == [(16, 16), (16,), (20,), (3,)]
    assert lengths(longest) == [(20, 20), (20,), (20,), (3,)]
    assert lengths(likely) == lengths(likely), "drawn, and the same each time"
    drawn = [each.lengths[0] for each in likely.script([request(max_tokens=1000)] * 2000)]
    assert sum(drawn) / len(drawn) == pytest.approx(10, rel=0.1)
    assert len(set(drawn)) > 20


def test_the_largest_block_that_holds_hardly_more_is_best() -> None:
    assert best_block_size([held(8, 20.0), held(16, 10.2), held(32, 5.6)]) == 16
    assert best_block_size([held(8, 20.0), held(16, 11.0)]) == 8


@pytest.mark.parametrize(
    ("token_bytes", "kv_memory"), [(1, "0.6KiB"), (1024, "610KiB"), (2**20, "610MiB"), (5 * 2**20, "3.0GiB")]
)
def test_advised_memory_is_rounded_up(token_bytes: int, kv_memory: str) -> None:
    """30 blocks at the peak, half a block for each of 8 sequences, and 4 tails: 38 blocks of 16."""
    advice = advise(held(16, 10.0), max_width=4, token_bytes=token_bytes)
    assert advice.kv_memory == kv_memory.replace(".0", "")
    assert 38 * 16 * token_bytes <= advice.kv_bytes <= 1.1 * 38 * 16 * token_bytes


def test_a_forecast_counts_shared_slots_once() -> None:
    assert held(16, 10.0).slots_per_sequence == 40
    assert replace(held(16, 0.0), mean_running_sequences=0.0).slots_per_sequence == 0

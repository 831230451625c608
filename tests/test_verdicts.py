"""What becomes of a row over which a process ended."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from log_lines import log_lines

from pagedbatch.input.preparation.board import Board, Progress
from pagedbatch.input.preparation.limits import RowLimits
from pagedbatch.input.preparation.verdicts import EXIT_MEMORY, TIME_SIGNAL, Ending, Verdicts
from pagedbatch.preparation_steps import CHAT_TEMPLATE

TIMED_OUT = -TIME_SIGNAL


def ending(
    exit_code: int | None = TIMED_OUT,
    *,
    step: str = "",
    source: str = "",
    rendered: bool = False,
    fresh: bool = True,
    retry: bool = False,
) -> Ending:
    return Ending(exit_code, Progress(step, source, rendered), fresh, retry)


@pytest.mark.parametrize(
    ("exit_code", "fresh", "retry", "is_final"),
    [
        (TIMED_OUT, False, False, True),
        (EXIT_MEMORY, True, False, True),
        (EXIT_MEMORY, False, False, False),
        (EXIT_MEMORY, False, True, True),
        (-signal.SIGKILL, True, False, False),
        (-signal.SIGSEGV, False, True, True),
        (None, True, False, False),
        (None, True, True, True),
    ],
)
def test_what_may_be_anothers_fault_is_tried_again_once(
    exit_code: int | None, fresh: bool, retry: bool, is_final: bool
) -> None:
    found = Verdicts(RowLimits()).verdict(ending(exit_code, fresh=fresh, retry=retry))
    assert (found is not None) == is_final


def test_a_source_is_remembered_with_its_reason() -> None:
    verdicts = Verdicts(RowLimits(cpu_seconds=2))
    verdicts.verdict(ending(step="compiling regex", source="regex 1"))
    verdicts.verdict(ending(-signal.SIGABRT, step="compiling regex", source="regex 2"))
    reason = "for an earlier row, compiling regex took more than 2 s of CPU time (--row-prepare-timeout)"
    assert verdicts.refused == {"regex 1": reason}


@pytest.fixture
def told() -> Iterator[list[str]]:
    with log_lines() as lines:
        yield lines


def test_strikes_count_in_a_row_only(told: list[str]) -> None:
    verdicts = Verdicts(RowLimits())
    for rendered in (False, False, True, False):
        verdicts.verdict(ending(step=CHAT_TEMPLATE, rendered=rendered))
    assert (verdicts.template_seconds, told) == (None, [])
    verdicts.verdict(ending(step="tokenizing"))
    verdicts.verdict(ending(EXIT_MEMORY, step=CHAT_TEMPLATE))
    assert verdicts.template_seconds == 0.1
    assert len(told) == 1
    verdicts.verdict(ending(step="tokenizing", rendered=True))
    assert verdicts.template_seconds is None


def test_little_time_is_never_more_than_the_limit() -> None:
    verdicts = Verdicts(RowLimits(cpu_seconds=0.05))
    for _ in range(3):
        verdicts.verdict(ending(step=CHAT_TEMPLATE))
    assert verdicts.template_seconds == 0.05


def test_the_board_says_what_was_written_last() -> None:
    board = Board()
    assert board.read() == Progress("", "", False)
    board.write("compiling ", "é" * 1000)
    board.write_rendered()
    assert board.read() == Progress("compiling ", "é" * 125, True)
    board.write("x", "")
    assert board.read() == Progress("x", "", True)
    board.clear()
    assert board.read() == Progress("", "", False)

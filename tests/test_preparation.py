"""Rows prepared in a process that can be ended: what a row does there costs that row, and no other one."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from log_lines import log_lines
from tiny_job import ByteTokenizer

from pagedbatch.errors import RowError
from pagedbatch.input.kept_columns import KeptColumns
from pagedbatch.input.prefetch import Prepared, Preparer
from pagedbatch.input.preparation.bounded import BoundedPreparation
from pagedbatch.input.preparation.limits import RowLimits
from pagedbatch.input.requests import ModelLimits, PromptBuilder
from pagedbatch.input.row import RawRow, Row, place_row
from pagedbatch.preparation_steps import CHAT_TEMPLATE, step
from pagedbatch.sequence import Request

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="rows are prepared in the same process there")

#: Far more than any healthy row here takes, on a slow machine too.
LIMITS = RowLimits(cpu_seconds=1.5, memory_bytes=2**28, stalled_seconds=5)


class Hostile(Preparer):
    """Does what the row's `do` says, and then prepares it."""

    def request(self, row: Row) -> Request | str:
        do = row.fields.get("do", "")
        if do == "loop":
            while True:
                pass
        if do == "wait":
            signal.pause()
        if do == "fill":
            bytearray(2**30)
        if do == "hoard":  # a share that two rows together can't have
            self.hoard = [*getattr(self, "hoard", []), bytearray(2**27 + 2**26)]
        if do == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if do == "kill once" and not os.path.exists(row.fields["mark"]):
            open(row.fields["mark"], "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        if do == "abort":
            os.abort()
        if do == "exit":
            os._exit(0)
        if do == "template":
            with step(CHAT_TEMPLATE):
                while row.fields["endless"]:
                    pass
        if do == "source":
            try:
                with step("compiling it", row.fields["source"]):
                    while row.fields["endless"]:
                        pass
            except RowError as error:
                return f"{row.place}: {error}"
        return super().request(row)


@pytest.fixture
def notices() -> Iterator[list[str]]:
    with log_lines() as lines:
        yield lines


@pytest.fixture
def preparation() -> Iterator[BoundedPreparation]:
    prompts = PromptBuilder(ByteTokenizer(), ModelLimits(64, 256), model_defaults={}, run_settings={})
    opened = BoundedPreparation(Hostile(prompts, KeptColumns(["kept"]), ()), LIMITS)
    yield opened
    opened.close()


def rows(*fields: dict[str, Any]) -> list[Row]:
    return [place_row(RawRow({"prompt": f"p{i}", **own}, line=i + 1), i) for i, own in enumerate(fields)]


def outcome(prepared: Prepared) -> str:
    """The prompt, or the error."""
    assert (prepared.request is None) != (prepared.error is None)
    return prepared.error or bytes(prepared.request.prompt_token_ids).decode()


def outcomes(preparation: BoundedPreparation, *fields: dict[str, Any]) -> list[str]:
    return [outcome(each) for each in preparation.prepare(rows(*fields)) if each is not None]


@pytest.mark.parametrize(
    ("do", "reason"),
    [
        ("loop", "reading the row took more than 1.5 s of CPU time (--row-prepare-timeout)"),
        ("fill", "reading the row took more than 0.25 GiB of memory"),
        ("wait", "reading the row stood still for 5 s, and again when it was tried once more"),
        ("kill", "reading the row ended its process (SIGKILL), and again when it was tried once more: "
         "often memory was not enough"),
        ("abort", "reading the row ended its process (SIGABRT), and again when it was tried once more: "
         "often memory was not enough"),
        ("exit", "reading the row ended its process (exit code 0), and again when it was tried once more: "
         "often memory was not enough"),
    ],
)  # fmt: skip
def test_a_row_that_takes_too_much_is_an_error_and_the_others_keep_their_order(
    preparation: BoundedPreparation, do: str, reason: str
) -> None:
    found = outcomes(preparation, {}, {"do": do}, {}, {}, {"do": do}, {})
    assert found == ["p0", f"line 2: {reason}", "p2", "p3", f"line 5: {reason}", "p5"]


def test_a_kill_from_outside_costs_no_row(preparation: BoundedPreparation, tmp_path: Any) -> None:
    once = {"do": "kill once", "mark": str(tmp_path / "mark")}
    assert outcomes(preparation, {}, once, {}) == ["p0", "p1", "p2"]
    assert (tmp_path / "mark").exists()


def test_what_rows_before_have_left_in_memory_is_not_a_rows_fault(preparation: BoundedPreparation) -> None:
    assert outcomes(preparation, {"do": "hoard"}, {"do": "hoard"}, {"do": "hoard"}) == ["p0", "p1", "p2"]


def test_a_source_without_end_is_tried_once(preparation: BoundedPreparation) -> None:
    hostile, healthy = ({"do": "source", "source": name, "endless": name == "a"} for name in "ab")
    found = outcomes(preparation, hostile, hostile, healthy, {})
    took = "compiling it took more than 1.5 s of CPU time (--row-prepare-timeout)"
    assert found == [f"line 1: {took}", f"line 2: not tried: for an earlier row, {took}", "p2", "p3"]


def test_a_chat_template_without_end_gets_little_time_until_it_ends_again(
    preparation: BoundedPreparation, notices: list[str]
) -> None:
    endless, ends = ({"do": "template", "endless": value} for value in (True, False))
    found = outcomes(preparation, *[endless] * 5, ends, endless, ends)
    full = "rendering the chat template took more than 1.5 s of CPU time (--row-prepare-timeout)"
    little = "rendering the chat template took more than 0.1 s of CPU time; it gets no more, as it was too much for the rows before"  # noqa: E501
    assert found[:5] == [f"line {i}: {full if i <= 3 else little}" for i in range(1, 6)]
    assert found[5:] == ["p5", f"line 7: {full}", "p7"]
    assert [line.partition(":")[0] for line in notices] == ["3 rows in a row"]


def test_errors_that_are_known_before_come_in_their_place(preparation: BoundedPreparation) -> None:
    broken = Row(1, None, False, {}, 2, "line 2: malformed")
    nested: Any = []
    for _ in range(50_000):
        nested = [nested]
    given = rows({}, {}, {"x": nested}, {"prompt": 5}, {"kept": "k"})
    given[1] = broken
    found = [each for each in preparation.prepare(given) if each is not None]
    assert found[1].error == "line 2: malformed"
    assert str(found[2].error).startswith("line 3: can't be read: RecursionError")
    assert found[3].error == "line 4: prompt must be text, got 5"
    assert (outcome(found[0]), outcome(found[4])) == ("p0", "p4")
    assert found[4].context.kept == b'{"kept": "k"}'


def test_many_rows_come_in_order_with_few_ahead(preparation: BoundedPreparation) -> None:
    drawn: list[int] = []

    def source() -> Iterator[Row]:
        for row in rows(*[{"prompt": "x" * (1 + i % 60), "max_tokens": i % 5} for i in range(500)]):
            drawn.append(row.index)
            yield row

    taken = 0
    for prepared in preparation.prepare(source(), 8):
        if prepared is not None:
            assert prepared.request is not None
            assert (prepared.request.request_id, len(prepared.request.prompt_token_ids)) == (taken, 1 + taken % 60)
            assert prepared.request.params.max_tokens == min(taken % 5, 63 - taken % 60)
            taken += 1
            assert len(drawn) <= taken + 8
    assert taken == 500


def test_rows_of_megabytes_get_through(preparation: BoundedPreparation) -> None:
    found = outcomes(preparation, *[{"x": "y" * 3_000_000} for _ in range(4)])
    assert found == ["p0", "p1", "p2", "p3"]


def test_what_the_input_raises_comes_behind_the_rows_before(preparation: BoundedPreparation) -> None:
    def source() -> Iterator[Row]:
        yield from rows({}, {})
        raise OSError("gone")

    taken: list[str] = []
    with pytest.raises(OSError, match="gone"):
        taken.extend(outcome(each) for each in preparation.prepare(source()) if each is not None)
    assert outcomes(preparation, {}) == ["p0"]


def test_a_pass_that_is_left_early_does_not_disturb_the_next(preparation: BoundedPreparation) -> None:
    early = preparation.prepare(rows(*[{"prompt": f"old{i}"} for i in range(40)]))
    first = next(early)
    assert first is not None
    assert outcome(first) == "old0"
    assert outcomes(preparation, {}, {}) == ["p0", "p1"]


def test_a_pass_can_be_cancelled_in_the_middle_of_a_row(preparation: BoundedPreparation) -> None:
    passing = preparation.prepare(rows({"do": "wait"}))
    preparation.cancel()
    assert list(passing) == []


def test_whoever_waits_for_a_slow_row_is_told() -> None:
    prompts = PromptBuilder(ByteTokenizer(), ModelLimits(64, 256), model_defaults={}, run_settings={})
    opened = BoundedPreparation(Hostile(prompts, KeptColumns(()), ()), RowLimits(cpu_seconds=1.5))
    try:
        found = list(opened.prepare(rows({}, {"do": "loop"}, {})))
    finally:
        opened.close()
    assert found.count(None) > 0
    assert len(found) - found.count(None) == 3

"""Nothing that a row says stops the others: fifty hostile kinds in one job, and as many more as chance makes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hostile import HEALTHY, KINDS, LINES, MAY_BE_ANSWERED
from hostile_job import between_healthy, healthy_among, run_lines
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


@pytest.fixture(scope="module")
def alone(rand_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What the healthy rows come to with nobody beside them."""
    exit_code, records = run_lines(tmp_path_factory.mktemp("alone"), rand_model_path, between_healthy([]))
    assert exit_code == 0
    return healthy_among(records)


def test_fifty_kinds_of_hostile_rows_are_errors_and_the_others_unchanged(
    rand_model_path: Path, alone: list[str], tmp_path: Path
) -> None:
    lines = between_healthy([make() for make in KINDS.values()])
    exit_code, records = run_lines(tmp_path, rand_model_path, lines)
    assert exit_code == 3
    assert healthy_among(records) == alone
    assert len(records) == len(lines)
    healthy = {row["id"] for row in HEALTHY}
    kinds = dict(zip(KINDS, [record for record in records if record.get("id") not in healthy], strict=True))
    answered = {kind for kind, record in kinds.items() if record.get("error") is None}
    assert answered <= MAY_BE_ANSWERED
    errors = [str(record["error"]) for record in kinds.values()]
    assert [error for error in errors if "\n" in error or "Traceback" in error or "can't be read: " in error] == []


def check_lines(folder: Path, model: Path, alone: list[str], lines: list[bytes]) -> None:
    """A job of these lines between the healthy rows ends, and the healthy rows come to the same as alone."""
    exit_code, records = run_lines(folder, model, between_healthy(lines))
    assert exit_code in (0, 3)
    assert healthy_among(records) == alone


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(lines=st.lists(LINES, min_size=8, max_size=12))
def test_rows_of_any_kind_leave_the_others_unchanged(
    rand_model_path: Path, alone: list[str], tmp_path: Path, lines: list[bytes]
) -> None:
    check_lines(tmp_path, rand_model_path, alone, lines)

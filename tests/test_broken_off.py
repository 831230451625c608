"""A run that fails or is interrupted, on a tiny model: what it keeps and says, and that it can be taken up again."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest
from workplace import MIXED, View, Workplace

from pagedbatch.errors import RunError, UsageError
from pagedbatch.step import ModelRunnerOutput, SchedulerOutput


def _break_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    from pagedbatch.model.runner import ModelRunner

    execute = ModelRunner.execute

    def failing(self: ModelRunner, output: SchedulerOutput) -> ModelRunnerOutput:
        if output.step == step:
            raise RuntimeError("out of memory\nand a long story")
        return execute(self, output)

    monkeypatch.setattr(ModelRunner, "execute", failing)


def test_a_failed_run_keeps_what_it_finished_and_resumes(words: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    words.write(MIXED)
    words.run(max_tokens=12)
    whole = words.output.read_bytes()
    words.output.unlink()

    with monkeypatch.context() as patch:
        _break_at(patch, step=30)
        view = View()
        with pytest.raises(RunError, match=r"a step failed: RuntimeError: out of memory$"):
            words.run(view, max_tokens=12, max_num_seqs=8)
    assert not words.output.exists()
    kept = len(words.journal.read_bytes().splitlines()) - 1
    assert 0 < kept < len(MIXED)
    assert words.stats["rows"] == {"total": 24, "ok": kept, "error": 0, "resumed": 0}
    assert view.notices == [
        f"{kept} of 24 rows are finished and kept in {words.journal}: the same command goes on from there"
    ]

    with pytest.raises(UsageError, match=r"max_tokens: was 12, now 13.*--restart"):
        words.run(max_tokens=13)
    view = View()
    assert words.run(view, max_tokens=12, max_num_seqs=8, block_size=8).exit_code == 0
    assert view.opened_with == (24, kept)
    assert words.stats["rows"] == {"total": 24, "ok": 24, "error": 0, "resumed": kept}
    assert not words.journal.exists()
    assert _without_cache_counts(words.output.read_bytes()) == _without_cache_counts(whole)


def _without_cache_counts(data: bytes) -> list[Any]:
    """Records without what may depend on the batch: cache hits, and the last digits of logprobs."""

    def keep(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: keep(item) for key, item in value.items() if key not in ("cached_tokens",)}
        if isinstance(value, list):
            return [keep(item) for item in value]
        return pytest.approx(value, abs=1e-4) if isinstance(value, float) else value

    return [keep(json.loads(line)) for line in data.splitlines()]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_after_its_step_and_resumes(words: Workplace, number: int) -> None:
    words.write(MIXED)
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    sent: list[int] = []

    def interrupt(rows_done: int) -> None:
        if rows_done >= 5 and not sent:
            sent.append(rows_done)
            os.kill(os.getpid(), number)

    view = View(interrupt)
    result = words.run(view, max_tokens=12, max_num_seqs=4)
    assert result.exit_code == 130
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert view.rows_done == sent[0]
    assert view.notices == [f"interrupted: {sent[0]} of 24 rows are finished and kept in {words.journal}: "
                            "the same command goes on from there"]  # fmt: skip
    assert words.stats["rows"]["ok"] == sent[0]
    assert not words.output.exists()
    assert words.run(max_tokens=12, max_num_seqs=4).exit_code == 0
    assert [record["id"] for record in words.records()] == [row["id"] for row in MIXED]


def test_a_changed_input_does_not_resume(words: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    words.write(MIXED)
    with monkeypatch.context() as patch:
        _break_at(patch, step=30)
        with pytest.raises(RunError):
            words.run(max_tokens=12, max_num_seqs=8)
    words.write([*MIXED[:-1], {"id": "new", "prompt": "x"}])
    with pytest.raises(UsageError, match=r"input: was 1452 bytes, now 1399.*--restart"):
        words.run(max_tokens=12)
    assert words.run(max_tokens=12, restart=True).exit_code == 0
    assert words.stats["rows"]["resumed"] == 0
    assert words.records()[-1]["id"] == "new"


def test_a_limit_can_be_raised_on_resume(words: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    words.write(MIXED)
    with monkeypatch.context() as patch:
        _break_at(patch, step=15)
        with pytest.raises(RunError):
            words.run(max_tokens=12, limit=10, max_num_seqs=8)
    assert words.run(max_tokens=12, limit=15).exit_code == 0
    assert [record["index"] for record in words.records()] == list(range(15))
    assert 0 < words.stats["rows"]["resumed"] < 10

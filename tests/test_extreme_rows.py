"""Rows that would stop a run, beside good ones, on a tiny model: each is an error of its own, the others as ever."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from engines import run_engine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from workplace import Workplace

from pagedbatch.errors import ParamError
from pagedbatch.model.runner import ModelRunner
from pagedbatch.params import resolve
from pagedbatch.sequence import Request
from pagedbatch.step import BeamResult, ModelRunnerOutput, SchedulerOutput

GOOD: list[dict[str, Any]] = [
    {"id": f"good {i}", "prompt": f"row number {i}", **more}
    for i, more in enumerate([{}, {"n": 3, "temperature": 0.9}, {"num_beams": 3, "n": 2}, {"logprobs": 2}] * 2)
]
HOSTILE: list[dict[str, Any]] = [
    {"n": 10**9},
    {"best_of": 10**7},
    {"sample_index": 2**64},
    {"top_k": 2**70},
    {"top_k": 1e30},
    {"seed": 2**300},
    {"priority": 2**80},
    {"logit_bias": {"5": 1e308}, "num_beams": 2},
    {"temperature": 1e300},
    {"repetition_penalty": 1e-300},
    {"frequency_penalty": 1e200},
    {"length_penalty": 1e10, "num_beams": 2},
    {"stop": ["x"] * 5000},
]


def records(work: Workplace, rows: list[dict[str, Any]], exit_code: int, **options: Any) -> dict[str, Any]:
    """The records by id, without their places: those of a file with other rows are told apart by these alone."""
    work.write(rows)
    assert work.run(max_tokens=8, prefix_cache=False, **options).exit_code == exit_code
    return {record["id"]: record | {"index": None} for record in work.records()}


def test_every_hostile_number_is_its_rows_error(words: Workplace) -> None:
    bad = [{"id": f"bad {i}", "prompt": "a", **each} for i, each in enumerate(HOSTILE)]
    mixed = [row for pair in zip(GOOD, bad, strict=False) for row in pair] + bad[len(GOOD) :]
    found = records(words, mixed, 3)
    for row, each in zip(bad, HOSTILE, strict=True):
        error = found.pop(row["id"])["error"]
        assert any(name in error for name in each)
        assert len(error) < 250
    assert json.dumps(found) == json.dumps(records(words, GOOD, 0))


GUILTY = [5, 6, 200, 7]


def has_guilty(step: SchedulerOutput) -> bool:
    """Whether its third token is in a step, however small: no other row begins with it."""
    return any(GUILTY[2] in each.token_ids[: max(0, 4 - each.context_len)] for each in step.sequences)


def with_guilty(work: Workplace, reason: str) -> None:
    """A run of the good rows and the guilty one, which is an error for this reason; the others are as without it."""
    with pytest.MonkeyPatch.context() as undisturbed:
        undisturbed.setattr(ModelRunner, "execute", EXECUTE)
        expected = records(work, GOOD, 0)
    found = records(work, [*GOOD[:3], {"id": "bad", "prompt_token_ids": GUILTY}, *GOOD[3:]], 3)
    assert found.pop("bad")["error"] == f"line 4: {reason}"
    assert found == expected


EXECUTE = ModelRunner.execute


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, IndexError])
def test_a_prompt_that_the_model_fails_at(
    words: Workplace, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """The forward has written K/V when it raises."""

    def failing(self: ModelRunner, step: SchedulerOutput) -> ModelRunnerOutput:
        result = EXECUTE(self, step)
        if has_guilty(step):
            raise error("at this token\nand more")
        return result

    monkeypatch.setattr(ModelRunner, "execute", failing)
    with_guilty(words, f"the model can't run this row, though it ran alone: {error.__name__}: at this token")
    assert words.stats["memory"]["failed_steps"] >= 2


def test_rows_beside_one_that_spoils_the_step(words: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a kernel does that reads past the end of a row: beside a guilty one nobody's logits are numbers."""

    def spoiling(self: ModelRunner, step: SchedulerOutput) -> ModelRunnerOutput:
        result = EXECUTE(self, step)
        if not has_guilty(step):
            return result
        return ModelRunnerOutput(
            [drawn._replace(error="no numbers") for drawn in result.samples],
            [BeamResult([], [], [], [], error="no numbers") for _ in result.beams],
        )

    monkeypatch.setattr(ModelRunner, "execute", spoiling)
    with_guilty(words, "no numbers")


numbers = st.one_of(
    st.integers(-2, 6),
    st.sampled_from([2**16, 2**31, 2**63 - 1, 2**63, -(2**63), 10**30]),
    st.floats(),
    st.sampled_from([0.0, 5e-324, 1e-300, 1e-40, 1e-6, 1e-3, 1.0, 1e3, 1e6, 1e9, -1e9, 1e38, 1e300]),
)
NUMERIC = [
    "sample_index", "temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "logprobs", "prompt_logprobs",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "no_repeat_ngram_size", "length_penalty",
    "diversity_penalty",
]  # fmt: skip


@st.composite
def extreme_params(draw: st.DrawFn) -> dict[str, Any]:
    """What may come in a row, each value near a bound of some number type."""
    layer = draw(st.dictionaries(st.sampled_from(NUMERIC), numbers, max_size=5))
    layer |= draw(
        st.sampled_from([{}, {"n": 3}, {"num_beams": 3}, {"best_of": 4}, {"num_beams": 4, "num_beam_groups": 2}])
    )
    if draw(st.booleans()):
        layer["logit_bias"] = {str(draw(st.integers(0, 200))): draw(numbers) for _ in range(3)}
    layer["logprobs_mode"] = draw(st.sampled_from(["raw", "processed"]))
    return layer


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layer=extreme_params())
def test_whatever_is_accepted_stays_finite(rand_model_path: Path, layer: dict[str, Any]) -> None:
    """Alone and beside a plain row, which it does not change; no step fails, and no row is not a number."""
    try:
        params = resolve({}, {"max_tokens": 5}, layer)
    except ParamError:
        return
    plain = Request(0, [1, 40, 41], resolve({}, {"max_tokens": 5}))
    (alone,) = run_engine(rand_model_path, [plain]).outputs.values()
    run = run_engine(rand_model_path, [plain, Request(1, [1, 50, 60, 70], params, rng_key=7)])
    assert run.outputs[0].error is None
    assert run.outputs[0].outputs[0].token_ids == alone.outputs[0].token_ids
    assert run.counters.failed_steps == 0
    assert "not finite" not in (run.outputs[1].error or "")
    for output in run.outputs[1].outputs:
        assert all(map(math.isfinite, output.token_logprobs))

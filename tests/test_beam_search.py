"""The ranking of beams against a second transcription of its rules, and on paper."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from fake_runs import fake_run, request
from hypothesis import given
from hypothesis import strategies as st

from pagedbatch.engine.beam_search import length_penalised, num_candidates, select
from pagedbatch.params import GenerationParams

EARLY_STOPPING: list[bool | str] = [False, True, "never"]


@dataclass(frozen=True)
class Step:
    """The arguments of `select`."""

    params: GenerationParams
    scores: list[float]
    ends: list[bool]
    hypothesis_scores: list[float]
    length: int
    max_length: int


@st.composite
def steps(draw: st.DrawFn) -> Step:
    num_beams = draw(st.integers(2, 5))
    params = GenerationParams(
        num_beams=num_beams,
        length_penalty=draw(st.sampled_from([-1.5, -1.0, 0.0, 0.5, 1.0, 2.0])),
        early_stopping=draw(st.sampled_from(EARLY_STOPPING)),
    )
    # Quarters make ties frequent.
    scores = sorted(draw(st.lists(st.integers(-80, 0), min_size=1, max_size=3 * num_beams)), reverse=True)
    so_far = draw(st.lists(st.integers(-80, 0), max_size=num_beams))
    length = draw(st.integers(1, 12))
    at_limit = draw(st.booleans())
    return Step(
        params=params,
        scores=[score / 4 for score in scores],
        ends=[at_limit or draw(st.booleans()) for _ in scores],
        hypothesis_scores=sorted((score / 4 for score in so_far), reverse=True),
        length=length,
        max_length=length if at_limit else draw(st.integers(length + 1, 20)),
    )


@given(steps())
def test_select_follows_its_rules(step: Step) -> None:
    k, penalty = step.params.num_beams, step.params.length_penalty
    verdict = select(step.params, step.scores, step.ends, step.hypothesis_scores, step.length, step.max_length)

    live_on: list[int] = []
    for candidate in range(len(step.scores)):
        if not step.ends[candidate] and len(live_on) < k:
            live_on.append(candidate)
    assert verdict.survivors == live_on

    # Every hypothesis in a list of its own, the best picked one by one, an existing one before an equal new one.
    hypotheses = [(score, "existing", i) for i, score in enumerate(step.hypothesis_scores)]
    hypotheses += [
        (step.scores[i] / step.length**penalty, "new", i) for i in range(min(k, len(step.scores))) if step.ends[i]
    ]
    best: list[tuple[float, str, int]] = []
    while hypotheses and len(best) < k:
        top = max(score for score, _, _ in hypotheses)
        best.append(next(each for each in hypotheses if each[0] == top))
        hypotheses.remove(best[-1])
    assert verdict.kept == [i for _, kind, i in best if kind == "existing"]
    assert verdict.finished == [i for _, kind, i in best if kind == "new"]
    assert verdict.finished_scores == pytest.approx([score for score, kind, _ in best if kind == "new"])

    if not live_on:
        assert verdict.done
    elif len(best) < k:
        assert not verdict.done
    elif step.params.early_stopping is True:
        assert verdict.done
    else:
        hopeful = step.params.early_stopping == "never" and penalty > 0
        reachable = step.scores[live_on[0]] / (step.max_length if hopeful else step.length) ** penalty
        assert verdict.done == (reachable <= min(score for score, _, _ in best))


@given(st.floats(-50, 0), st.integers(1, 500), st.floats(-3, 3))
def test_the_penalty_is_over_the_generated_length(score: float, length: int, penalty: float) -> None:
    assert length_penalised(score, length, penalty) == pytest.approx(score / length**penalty)


@pytest.mark.parametrize(("num_ends", "wanted"), [(0, 8), (1, 8), (2, 12), (3, 16)])
def test_enough_candidates_that_every_beam_can_end_in_every_way(num_ends: int, wanted: int) -> None:
    assert num_candidates(4, num_ends) == wanted


def decide(early_stopping: bool | str, length_penalty: float, **changes: Any) -> bool:
    """Two hypotheses of -1.0 and -1.2 stand after four tokens of at most eight; the best live beam sums to -6."""
    params = GenerationParams(num_beams=2, early_stopping=early_stopping, length_penalty=length_penalty)
    arguments = {"scores": [-6.0, -7.0], "ends": [False, False], "hypothesis_scores": [-1.0, -1.2]}
    return select(params, **{**arguments, "length": 4, "max_length": 8, **changes}).done


def test_when_a_search_is_over() -> None:
    assert decide(True, 1.0)
    assert not decide(True, 1.0, hypothesis_scores=[-1.0])
    assert decide(False, 1.0)  # -6 / 4 = -1.5 is worse than -1.2
    assert not decide("never", 1.0)  # -6 / 8 = -0.75 is better
    assert decide("never", 1.0, max_length=5)  # -6 / 5 = -1.2 is no better
    assert decide("never", 0.0)
    assert decide("never", -1.0)
    assert not decide(False, 2.0)  # -6 / 16


@given(
    num_beams=st.integers(2, 5),
    early_stopping=st.sampled_from(EARLY_STOPPING),
    length_penalty=st.sampled_from([-1.0, 0.0, 1.0, 2.0]),
    prompt=st.lists(st.integers(1, 10), min_size=1, max_size=6),
    data=st.data(),
)
def test_hypotheses_are_distinct_sorted_and_scored(
    num_beams: int, early_stopping: bool | str, length_penalty: float, prompt: list[int], data: st.DataObject
) -> None:
    params: dict[str, Any] = {"early_stopping": early_stopping, "length_penalty": length_penalty}
    n = data.draw(st.integers(1, num_beams))
    row = request(0, prompt, num_beams=num_beams, n=n, max_tokens=data.draw(st.integers(2, 15)), **params)
    outputs = fake_run([row]).outputs[0].outputs
    assert len(outputs) == n
    assert len({tuple(output.token_ids) for output in outputs}) == n
    scores = [output.score for output in outputs if output.score is not None]
    assert scores == sorted(scores, reverse=True)
    for output, score in zip(outputs, scores, strict=True):
        assert output.cumulative_logprob == pytest.approx(sum(output.token_logprobs))
        assert score == pytest.approx(output.cumulative_logprob / len(output.token_ids) ** length_penalty)

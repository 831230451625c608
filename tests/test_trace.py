"""A trace's lengths as requests: samples, limits, what is cut and what is lifted."""

from __future__ import annotations

import random

import pytest

from pagedbatch.errors import UsageError
from pagedbatch.tools.simulate.trace import RequestLengths, SampleLengths, parse_log_normal, script_trace


def test_samples_have_the_lengths_that_the_trace_gives_them() -> None:
    first, second = script_trace(
        [RequestLengths(5, 9, sample_tokens=(3, 9, 0)), RequestLengths(5, 4)], 12, samples=SampleLengths()
    )
    assert first.lengths == (3, 7, 1)
    assert (first.request.params.n, first.is_cut, first.is_clamped) == (3, True, True)
    assert second.lengths == (4,)
    assert (second.request.params.n, second.is_cut, second.is_clamped) == (1, False, False)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (SampleLengths(2), "request 0: the trace has the lengths of 3 samples, --n is 2"),
        (SampleLengths(independent=True), "request 0: .* none can be drawn"),
    ],
)
def test_other_samples_than_the_traces_are_refused(samples: SampleLengths, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        list(script_trace([RequestLengths(5, 9, sample_tokens=(3, 9, 1))], 100, samples=samples))


def test_independent_lengths_have_the_traces_mean() -> None:
    lengths = SampleLengths(20_000, independent=True).draw(RequestLengths(1, 50), random.Random(0))
    assert sum(lengths) / len(lengths) == pytest.approx(50, rel=0.03)
    assert min(lengths) >= 1


def test_log_normal_lengths_have_the_means_asked_for() -> None:
    requests = [request for request, _ in zip(parse_log_normal("160,340,0.65", 0), range(20_000), strict=False)]
    assert sum(request.prompt_tokens for request in requests) / len(requests) == pytest.approx(160, rel=0.03)
    assert sum(request.output_tokens for request in requests) / len(requests) == pytest.approx(340, rel=0.03)

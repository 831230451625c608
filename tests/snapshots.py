"""Step snapshots and finished rows for tests, written by what matters in each."""

from __future__ import annotations

from hypothesis import strategies as st

from pagedbatch.outputs import CompletionOutput, EngineCounters, PoolCounts, RequestOutput, StepSnapshot
from pagedbatch.step import StepSeconds


def snapshot(
    step: int = 1,
    *,
    private: int = 0,
    shared: int = 0,
    cached: int = 0,
    free: int = 0,
    logical: int | None = None,
    filled_slots: int = 0,
    swapped: int = 0,
    running_groups: int = 0,
    running_sequences: int = 0,
    waiting_groups: int = 0,
    counters: EngineCounters | None = None,
    seconds: StepSeconds | None = None,
    host_seconds: float = 0.0,
    step_seconds: float = 0.1,
) -> StepSnapshot:
    """Without `logical`, every shared block stands in two tables."""
    return StepSnapshot(
        step=step,
        pool=PoolCounts(
            private=private,
            shared=shared,
            cached=cached,
            free=free,
            logical=private + 2 * shared if logical is None else logical,
            filled_slots=filled_slots,
            swapped=swapped,
        ),
        counters=counters or EngineCounters(),
        running_groups=running_groups,
        running_sequences=running_sequences,
        waiting_groups=waiting_groups,
        num_tokens=running_sequences,
        seconds=seconds or StepSeconds(),
        host_seconds=host_seconds,
        step_seconds=step_seconds,
    )


def finished_row(request_id: int, prompt: int, outputs: list[int], error: str | None = None) -> RequestOutput:
    """A row whose outputs have these token counts."""
    completions = [
        CompletionOutput(
            index=index,
            token_ids=[7] * count,
            token_logprobs=[0.0] * count,
            cumulative_logprob=0.0,
            finish_reason="length",
            stop_reason=None,
        )
        for index, count in enumerate(outputs)
    ]
    return RequestOutput(request_id, completions, prompt, error=error)


@st.composite
def pools(draw: st.DrawFn) -> StepSnapshot:
    """A snapshot of a pool of 64 blocks in any legal state."""
    live = draw(st.integers(0, 64))
    shared = draw(st.integers(0, live))
    cached = draw(st.integers(0, 64 - live))
    return snapshot(
        private=live - shared,
        shared=shared,
        cached=cached,
        free=64 - live - cached,
        logical=live + shared * draw(st.integers(1, 7)),
        filled_slots=draw(st.integers(live, live * 16)),
        running_sequences=draw(st.integers(0, 9)),
        waiting_groups=draw(st.integers(0, 9)),
    )

"""Hypothesis strategies for requests and engine settings: runs without a model, of any shape."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fake_runs import request
from hypothesis import strategies as st

from pagedbatch.sequence import Request

PREFIX = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6]


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """Greedy, samples or beams, often with a prefix that other requests have too."""
    prompt = PREFIX[: draw(st.integers(0, len(PREFIX)))] + draw(st.lists(st.integers(1, 10), min_size=1, max_size=12))
    kind = draw(
        st.one_of(
            st.just({}),
            st.fixed_dictionaries({"n": st.integers(2, 5)}),
            st.integers(2, 4).flatmap(
                lambda beams: st.fixed_dictionaries(
                    {
                        "num_beams": st.just(beams),
                        "n": st.integers(1, beams),
                        "early_stopping": st.sampled_from([False, True, "never"]),
                        "length_penalty": st.sampled_from([-1.0, 0.0, 1.0, 2.0]),
                    }
                )
            ),
        )
    )
    max_tokens = draw(st.integers(1, 24))
    return request(
        0,
        prompt,
        priority=draw(st.integers(0, 2)),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, min(4, max_tokens))),
        ignore_eos=draw(st.booleans()),
        stop=draw(st.sampled_from([(), (), ("cd",), ("fa", "b")])),
        **kind,
    )


@st.composite
def engine_settings(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "block_size": draw(st.integers(1, 8)),
        "num_swap_blocks": draw(st.sampled_from([0, 3, 12, 300])),
        "preemption": draw(st.sampled_from(["auto", "swap", "recompute"])),
        "max_num_seqs": draw(st.sampled_from([1, 3, 8, 64])),
        "max_num_batched_tokens": draw(st.sampled_from([1, 5, 16, 500])),
        "prefix_cache": draw(st.booleans()),
    }


batches = st.lists(requests(), min_size=1, max_size=7).map(
    lambda batch: [replace(each, request_id=row, rng_key=row) for row, each in enumerate(batch)]
)

"""From a trace's lengths to requests that can be simulated: prompts that share what the trace says, and no more.

Knows no engine.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pagedbatch.params import GenerationParams
from pagedbatch.sequence import Request
from pagedbatch.simulation.lengths import RequestLengths, fit
from pagedbatch.simulation.simulate import ScriptedRequest


@dataclass(frozen=True, slots=True)
class SampleLengths:
    """How long a request's samples are: all as long as the trace says, or each for itself.

    With `independent`, a sample's length is drawn from an exponential distribution whose mean is the trace's length.
    """

    n: int = 1
    independent: bool = False

    def draw(self, output_tokens: float, rng: random.Random) -> tuple[int, ...]:
        if not self.independent:
            return (max(1, round(output_tokens)),) * self.n
        return tuple(max(1, round(rng.expovariate(1 / output_tokens))) for _ in range(self.n))


ONE_SAMPLE = SampleLengths()


def script_trace(
    trace: Iterable[RequestLengths],
    max_model_len: int,
    *,
    samples: SampleLengths = ONE_SAMPLE,
    num_beams: int = 1,
    max_tokens: int | None = None,
    seed: int = 0,
) -> Iterator[ScriptedRequest]:
    """The requests of a trace, numbered from 0.

    Args:
        trace: lengths are cut to `max_model_len`.
        num_beams: above 1, each request is a beam search of this width, all of its beams as long as its output.
        max_tokens: the limit of every output, all that the scheduler knows beforehand; None: what the context leaves.
        seed: of the independent lengths.
    """
    rng = random.Random(seed)
    for index, asked in enumerate(trace):
        lengths = fit(asked, max_model_len)
        room = min(max_model_len - lengths.prompt_tokens, max_tokens or max_model_len)
        params = (
            GenerationParams(n=num_beams, num_beams=num_beams, max_tokens=room)
            if num_beams > 1
            else GenerationParams(n=samples.n, temperature=float(samples.n > 1), max_tokens=room)
        )
        yield ScriptedRequest(
            Request(index, _prompt(index, lengths), params),
            tuple(min(length, room) for length in samples.draw(lengths.output_tokens, rng)),
            is_cut=lengths != asked,
        )


def _prompt(index: int, lengths: RequestLengths) -> list[int]:
    """Token ids that begin as those of the request's prefix group do, and go on as no other's."""
    own = lengths.prompt_tokens - lengths.prefix_tokens
    return [2 * lengths.prefix] * lengths.prefix_tokens + [2 * index + 1] * own

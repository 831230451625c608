"""From a trace's lengths to requests that can be simulated: prompts that share what the trace says, and no more.

Knows no engine.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pagedbatch.errors import UsageError
from pagedbatch.params import GenerationParams
from pagedbatch.sequence import Request
from pagedbatch.tools.simulate.lengths import RequestLengths, fit, lift
from pagedbatch.tools.simulate.simulate import ScriptedRequest


@dataclass(frozen=True, slots=True)
class SampleLengths:
    """How many samples a request has and how long they are: as the trace says, or each for itself.

    `n` None: as many as the trace has lengths for, else one. With `independent`, a sample's length is drawn from an
    exponential distribution whose mean is the trace's length.
    """

    n: int | None = None
    independent: bool = False

    def draw(self, lengths: RequestLengths, rng: random.Random) -> tuple[int, ...]:
        """Raises ValueError where the trace has the samples' lengths and something else was asked for."""
        if lengths.sample_tokens is not None:
            if self.independent:
                raise ValueError("the trace has the lengths of its samples: none can be drawn")
            if self.n not in (None, len(lengths.sample_tokens)):
                raise ValueError(f"the trace has the lengths of {len(lengths.sample_tokens)} samples, --n is {self.n}")
            return lengths.sample_tokens
        n, mean = self.n or 1, lengths.output_tokens
        if not self.independent:
            return (mean,) * n
        return tuple(max(1, round(rng.expovariate(1 / mean))) for _ in range(n))


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
        trace: lengths are cut to `max_model_len`; those of 0 become 1.
        num_beams: above 1, each request is a beam search of this width, all of its beams as long as its output.
        max_tokens: the limit of every output, all that the scheduler knows beforehand; None: what the context leaves.
        seed: of the independent lengths.

    Raises:
        UsageError: a request has the lengths of its samples, and others were asked for.
    """
    rng = random.Random(seed)
    for index, asked in enumerate(trace):
        lifted = lift(asked)
        lengths = fit(lifted, max_model_len)
        try:
            outputs = samples.draw(lengths, rng) if num_beams == 1 else (lengths.output_tokens,)
        except ValueError as error:
            raise UsageError(f"request {index}: {error}") from error
        room = min(max_model_len - lengths.prompt_tokens, max_tokens or max_model_len)
        params = (
            GenerationParams(n=num_beams, num_beams=num_beams, max_tokens=room)
            if num_beams > 1
            else GenerationParams(n=len(outputs), temperature=float(len(outputs) > 1), max_tokens=room)
        )
        yield ScriptedRequest(
            Request(index, _prompt(index, lengths), params),
            tuple(min(length, room) for length in outputs),
            is_cut=lengths != lifted,
            is_lifted=lifted != asked,
        )


def _prompt(index: int, lengths: RequestLengths) -> list[int]:
    """Token ids that begin as those of the request's prefix group do, and go on as no other's."""
    own = lengths.prompt_tokens - lengths.prefix_tokens
    return [2 * lengths.prefix] * lengths.prefix_tokens + [2 * index + 1] * own

"""From lengths, of a trace or drawn at random, to requests that can be simulated."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from pagedbatch.errors import UsageError
from pagedbatch.params import GenerationParams
from pagedbatch.sequence import Request
from pagedbatch.tools.simulate.simulate import ScriptedRequest


@dataclass(frozen=True, slots=True)
class RequestLengths:
    """A request in tokens. The first `prefix_tokens` of its prompt are those of every request of its `prefix` group.

    `sample_tokens`: the lengths of its samples, where each is known; `output_tokens` is then the longest.
    """

    prompt_tokens: int
    output_tokens: int
    prefix: int = 0
    prefix_tokens: int = 0
    sample_tokens: tuple[int, ...] | None = None


def log_normal(mean_prompt: float, mean_output: float, sigma: float, seed: int) -> Iterator[RequestLengths]:
    """An endless stream of requests, with log-normal prompt and output lengths of these means; each is at least 1.

    `sigma` is the standard deviation of the logarithm, for both.
    """
    rng = random.Random(seed)

    def draw(mean: float) -> int:
        return max(1, round(rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)))

    while True:
        yield RequestLengths(draw(mean_prompt), draw(mean_output))


def parse_log_normal(means: str, seed: int) -> Iterator[RequestLengths]:
    """`log_normal` of a text such as `161.31,337.99,0.65`.

    Raises:
        UsageError: it is no such text.
    """
    try:
        prompt, output, sigma = map(float, means.split(","))
        if min(prompt, output) <= 0 or sigma < 0:
            raise ValueError
    except ValueError:
        raise UsageError(f"--log-normal: {means!r} is not IN,OUT,SIGMA such as 161.31,337.99,0.65") from None
    return log_normal(prompt, output, sigma, seed)


def truncate(request: RequestLengths, max_model_len: int) -> RequestLengths:
    """The request cut to a model's context: a prompt leaves room for one token, and an output fits in the rest."""
    prompt = min(request.prompt_tokens, max_model_len - 1)
    room = max_model_len - prompt
    return replace(
        request,
        prompt_tokens=prompt,
        output_tokens=min(request.output_tokens, room),
        prefix_tokens=min(request.prefix_tokens, prompt),
        sample_tokens=None if request.sample_tokens is None else tuple(min(n, room) for n in request.sample_tokens),
    )


def clamp(request: RequestLengths) -> RequestLengths:
    """The request with all lengths at least 1."""
    return replace(
        request,
        prompt_tokens=max(1, request.prompt_tokens),
        output_tokens=max(1, request.output_tokens),
        sample_tokens=None if request.sample_tokens is None else tuple(max(1, n) for n in request.sample_tokens),
    )


@dataclass(frozen=True, slots=True)
class SampleLengths:
    """How many samples a request has, and how long they are.

    `n` None: as many as the trace has lengths for, else one. With `independent`, the length of each sample is drawn
    from an exponential distribution with the length in the trace as its mean.
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
        max_tokens: limit of every output, which is all that the scheduler knows beforehand; None: the rest of the
            context.
        seed: of the independent lengths.

    Raises:
        UsageError: a request has the lengths of its samples, and others were asked for.
    """
    rng = random.Random(seed)
    for index, asked in enumerate(trace):
        clamped = clamp(asked)
        lengths = truncate(clamped, max_model_len)
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
            is_cut=lengths != clamped,
            is_clamped=clamped != asked,
        )


def _prompt(index: int, lengths: RequestLengths) -> list[int]:
    """Token ids that begin like those of the request's prefix group and continue like no other's."""
    own = lengths.prompt_tokens - lengths.prefix_tokens
    return [2 * lengths.prefix] * lengths.prefix_tokens + [2 * index + 1] * own

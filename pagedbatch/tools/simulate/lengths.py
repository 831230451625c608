"""Lengths of requests, drawn at random or cut to a context. Knows no engine and no file."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from pagedbatch.errors import UsageError


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
    """Requests without end, prompt and output lengths log-normal with these means; every length is at least 1.

    `sigma` is the standard deviation of the logarithm, for both.
    """
    rng = random.Random(seed)

    def draw(mean: float) -> int:
        return max(1, round(rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)))

    while True:
        yield RequestLengths(draw(mean_prompt), draw(mean_output))


def parse_log_normal(means: str, seed: int) -> Iterator[RequestLengths]:
    """`log_normal` of a text such as 161.31,337.99,0.65.

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


def fit(request: RequestLengths, max_model_len: int) -> RequestLengths:
    """The request cut to a model's context: a prompt leaves room for one token, an output takes what is left."""
    prompt = min(request.prompt_tokens, max_model_len - 1)
    room = max_model_len - prompt
    return replace(
        request,
        prompt_tokens=prompt,
        output_tokens=min(request.output_tokens, room),
        prefix_tokens=min(request.prefix_tokens, prompt),
        sample_tokens=None if request.sample_tokens is None else tuple(min(n, room) for n in request.sample_tokens),
    )


def lift(request: RequestLengths) -> RequestLengths:
    """The request with no length below 1: what a prompt and an output have at least."""
    return replace(
        request,
        prompt_tokens=max(1, request.prompt_tokens),
        output_tokens=max(1, request.output_tokens),
        sample_tokens=None if request.sample_tokens is None else tuple(max(1, n) for n in request.sample_tokens),
    )

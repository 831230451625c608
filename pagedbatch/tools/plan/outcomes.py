"""How long outputs will be: known for some requests, for the others what to suppose. Knows no engine."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pagedbatch.sequence import Request
from pagedbatch.tools.simulate.simulate import ScriptedRequest

#: Of its limit, what an output is expected to take where nobody says.
_EXPECTED_SHARE = 1 / 4


@dataclass(frozen=True, slots=True)
class Supposition:
    """What outputs of unknown length are taken to be. Requests whose outputs are known keep theirs.

    `tokens` is the length; None: `share` of each output's limit. With `is_mean` every output is drawn for itself, from
    an exponential distribution of that mean. No output leaves the limits of its request. `is_likely`: the one to count
    on among several.
    """

    name: str
    tokens: int | None = None
    share: float = 1.0
    is_mean: bool = False
    is_likely: bool = False

    def script(self, requests: Sequence[Request]) -> Iterator[ScriptedRequest]:
        """The requests with their outputs' lengths; the same ones each time."""
        rng = random.Random(0)
        for request in requests:
            yield ScriptedRequest(request, self._lengths(request, rng))

    def _lengths(self, request: Request, rng: random.Random) -> tuple[int, ...]:
        params = request.params
        count = 1 if params.use_beam_search else params.num_samples
        known = known_length(request)
        if known is not None:
            return (known,) * count
        tokens = self.share * params.max_tokens if self.tokens is None else self.tokens
        drawn = [rng.expovariate(1 / tokens) if self.is_mean else tokens for _ in range(count)]
        return tuple(min(max(round(length), params.min_tokens, 1), params.max_tokens) for length in drawn)


def known_length(request: Request) -> int | None:
    """How long all outputs of a request will be, where its parameters settle that."""
    params = request.params
    goes_on = params.ignore_eos and not params.stop and not params.stop_token_ids
    if params.min_tokens == params.max_tokens or (goes_on and request.constraint is None):
        return params.max_tokens
    return None


def suppositions(requests: Sequence[Request], block_size: int, expect_tokens: int | None) -> list[Supposition]:
    """From the shortest outputs to the longest; one alone where all are known.

    Between the two stand outputs of one block, where samples that end together share most, and those expected.
    """
    if all(known_length(request) is not None for request in requests):
        return [Supposition("known", is_likely=True)]
    return [
        Supposition("one token", tokens=1),
        Supposition("one block", tokens=block_size),
        Supposition("expected", tokens=expect_tokens, share=_EXPECTED_SHARE, is_mean=True, is_likely=True),
        Supposition("the limit"),
    ]

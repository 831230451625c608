"""How long outputs will be: known for some requests, assumed for the others."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pagedbatch.sequence import Request
from pagedbatch.tools.simulate.simulate import ScriptedRequest

#: The share of its limit that an output is expected to take, unless `--expect-tokens` says otherwise.
_EXPECTED_SHARE = 1 / 4


@dataclass(frozen=True, slots=True)
class LengthAssumption:
    """How long outputs of unknown length are assumed to be. Known lengths stay as they are.

    `tokens` is the length; None: `share` of each output's limit. With `is_mean`, each output's length is drawn from an
    exponential distribution of that mean. The limits of a request hold in any case. `is_likely` marks the assumption
    that the plan is based on.
    """

    name: str
    tokens: int | None = None
    share: float = 1.0
    is_mean: bool = False
    is_likely: bool = False

    def script(self, requests: Sequence[Request]) -> Iterator[ScriptedRequest]:
        """The requests with the lengths of their outputs; the same ones each time."""
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
    """How long all outputs of a request will be, if its parameters decide that."""
    params = request.params
    goes_on = params.ignore_eos and not params.stop and not params.stop_token_ids
    if params.min_tokens == params.max_tokens or (goes_on and request.constraint is None):
        return params.max_tokens
    return None


def length_assumptions(
    requests: Sequence[Request], block_size: int, expect_tokens: int | None
) -> list[LengthAssumption]:
    """From the shortest outputs to the longest; a single one if all lengths are known.

    In between are outputs of one block, with which samples that end together share most, and the expected ones.
    """
    if all(known_length(request) is not None for request in requests):
        return [LengthAssumption("known", is_likely=True)]
    return [
        LengthAssumption("one token", tokens=1),
        LengthAssumption("one block", tokens=block_size),
        LengthAssumption("expected", tokens=expect_tokens, share=_EXPECTED_SHARE, is_mean=True, is_likely=True),
        LengthAssumption("the limit"),
    ]

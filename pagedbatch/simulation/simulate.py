"""The engine on lengths alone: requests in, the account of its memory out. Knows no model and no file."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from pagedbatch.config import EngineConfig
from pagedbatch.engine.engine import Engine
from pagedbatch.params import GenerationParams
from pagedbatch.sequence import Request
from pagedbatch.simulation.lengths import RequestLengths, fit
from pagedbatch.simulation.runner import END, LengthRunner
from pagedbatch.stats.memory import MemoryAccount

#: Requests inside the engine at a time, in units of `max_num_seqs`.
_WINDOW = 2


@dataclass(frozen=True, slots=True)
class SampleLengths:
    """How long a request's samples are: all as long as the trace says, or each for itself.

    With `independent`, a sample's length is drawn from an exponential distribution whose mean is the trace's length.
    """

    n: int = 1
    independent: bool = False

    def draw(self, output_tokens: int, rng: random.Random) -> tuple[int, ...]:
        if not self.independent:
            return (output_tokens,) * self.n
        return tuple(max(1, round(rng.expovariate(1 / output_tokens))) for _ in range(self.n))


ONE_SAMPLE = SampleLengths()


@dataclass(frozen=True, slots=True)
class Simulated:
    """What a simulation gave: of requests that could not run the first one's message, and how many were cut to fit."""

    account: MemoryAccount
    num_ok: int
    num_error: int
    first_error: str | None
    num_cut: int
    num_steps: int
    prompt_tokens: int
    output_tokens: int
    seconds: float


def simulate(
    requests: Iterable[RequestLengths],
    config: EngineConfig,
    *,
    samples: SampleLengths = ONE_SAMPLE,
    num_beams: int = 1,
    max_tokens: int | None = None,
    block_bytes: int = 0,
    seed: int = 0,
) -> Simulated:
    """Runs the requests through the real scheduler and pool, first come first served, all there from the start.

    Args:
        requests: lengths are cut to `config.max_model_len`.
        config: `prefix_cache` matters only to requests with a prefix in common; `eos_token_ids` is set here.
        num_beams: above 1, each request is a beam search of this width, all of its beams as long as its output.
        max_tokens: the limit of every output, all that the scheduler knows beforehand; None: what the context leaves.
        block_bytes: of one block, for the account.
        seed: of the independent lengths and of the beams' descent.
    """
    rng = random.Random(seed)
    lengths: dict[int, tuple[int, ...]] = {}
    engine = Engine(replace(config, eos_token_ids=frozenset({END})), LengthRunner(lengths, seed))
    account = MemoryAccount(
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        block_bytes=block_bytes,
        max_num_seqs=config.max_num_seqs,
    )
    waiting = enumerate(requests)
    inside: dict[int, GenerationParams] = {}
    num_ok = num_error = num_cut = num_steps = prompt_tokens = output_tokens = 0
    first_error: str | None = None
    began = time.perf_counter()
    while True:
        while engine.num_unfinished < _WINDOW * config.max_num_seqs:
            arrived = next(waiting, None)
            if arrived is None:
                break
            index, request = arrived[0], fit(arrived[1], config.max_model_len)
            num_cut += request != arrived[1]
            room = min(config.max_model_len - request.prompt_tokens, max_tokens or config.max_model_len)
            lengths[index] = tuple(min(length, room) for length in samples.draw(request.output_tokens, rng))
            inside[index] = (
                GenerationParams(n=num_beams, num_beams=num_beams, max_tokens=room, seed=index, early_stopping=True)
                if num_beams > 1
                else GenerationParams(n=samples.n, temperature=float(samples.n > 1), max_tokens=room)
            )
            engine.add(Request(index, _prompt(index, request), inside[index], rng_key=index))
        if not engine.has_unfinished:
            break
        step = engine.step()
        num_steps += 1
        if step.snapshot is not None:
            account.observe(step.snapshot)
        for output in step.finished:
            params = inside.pop(output.request_id)
            del lengths[output.request_id]
            if output.error is not None:
                num_error += 1
                first_error = first_error or f"request {output.request_id}: {output.error}"
                continue
            num_ok += 1
            prompt_tokens += output.num_prompt_tokens
            output_tokens += output.num_output_tokens
            account.row_finished(output, params, config.max_model_len)
    account.close(engine.pool_counts())
    seconds = time.perf_counter() - began
    return Simulated(
        account=account,
        num_ok=num_ok,
        num_error=num_error,
        first_error=first_error,
        num_cut=num_cut,
        num_steps=num_steps,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        seconds=seconds,
    )


def _prompt(index: int, request: RequestLengths) -> list[int]:
    """Token ids that begin as those of the request's prefix group do, and go on as no other's."""
    own = request.prompt_tokens - request.prefix_tokens
    return [-1 - request.prefix] * request.prefix_tokens + [index + 1] * own

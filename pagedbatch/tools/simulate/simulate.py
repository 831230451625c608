"""The engine without a model: requests in, the account of its memory out."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from pagedbatch import __version__
from pagedbatch.config import EngineConfig
from pagedbatch.engine.engine import Engine
from pagedbatch.params import GenerationParams
from pagedbatch.sequence import Request
from pagedbatch.stats.memory import MemoryAccount
from pagedbatch.stats.schema import RowCounts, Setting, Stats, Throughput
from pagedbatch.tools.simulate.length_runner import END, LengthRunner

#: Maximum number of requests in the engine, in units of `max_num_seqs`; as in a run.
_WINDOW = 2


@dataclass(frozen=True, slots=True)
class ScriptedRequest:
    """A request and how long its outputs will be.

    `lengths` has an entry for each sample, in tokens, the end token included; all beams of a search are as long as the
    first. None is above `max_tokens`. `is_cut`: it was cut to the context; `is_clamped`: it had a length of 0.
    """

    request: Request
    lengths: tuple[int, ...]
    is_cut: bool = False
    is_clamped: bool = False


@dataclass(slots=True)
class Simulated:
    """The result of a simulation: its account, and counts of requests, steps and tokens.

    `first_error` is the message of the first request that could not run. `sum_groups` adds up the requests that ran in
    each step, `peak_groups` is the maximum.
    """

    account: MemoryAccount
    num_ok: int = 0
    num_error: int = 0
    first_error: str | None = None
    num_cut: int = 0
    num_clamped: int = 0
    num_steps: int = 0
    sum_groups: int = 0
    peak_groups: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0

    @property
    def mean_groups(self) -> float:
        """Requests that ran at once, averaged over steps."""
        return self.sum_groups / self.num_steps if self.num_steps else 0.0


def simulate(
    requests: Iterable[ScriptedRequest], config: EngineConfig, *, block_bytes: int = 0, seed: int = 0
) -> Simulated:
    """Runs the requests through the real scheduler and pool, first come, first served; all wait from the start.

    Args:
        requests: their ids are all different.
        config: `eos_token_ids` is set here.
        block_bytes: of one block, for the account.
        seed: of the beams' descent.
    """
    lengths: dict[int, tuple[int, ...]] = {}
    engine = Engine(replace(config, eos_token_ids=frozenset({END})), LengthRunner(lengths, seed))
    account = MemoryAccount(
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        block_bytes=block_bytes,
        max_num_seqs=config.max_num_seqs,
    )
    found = Simulated(account)
    waiting = iter(requests)
    inside: dict[int, GenerationParams] = {}
    began = time.perf_counter()
    while True:
        while engine.num_unfinished < _WINDOW * config.max_num_seqs:
            arrived = next(waiting, None)
            if arrived is None:
                break
            request = _stripped(arrived.request)
            found.num_cut += arrived.is_cut
            found.num_clamped += arrived.is_clamped
            lengths[request.request_id] = arrived.lengths
            inside[request.request_id] = request.params
            engine.add(request)
        if not engine.has_unfinished:
            break
        step = engine.step()
        found.num_steps += 1
        if step.snapshot is not None:
            account.observe(step.snapshot)
            found.sum_groups += step.snapshot.running_groups
            found.peak_groups = max(found.peak_groups, step.snapshot.running_groups)
        for output in step.finished:
            params = inside.pop(output.request_id)
            del lengths[output.request_id]
            if output.error is not None:
                found.num_error += 1
                found.first_error = found.first_error or f"request {output.request_id}: {output.error}"
                continue
            found.num_ok += 1
            found.prompt_tokens += output.num_prompt_tokens
            found.output_tokens += output.num_output_tokens
            account.row_finished(output, params, config.max_model_len)
    account.close(engine.pool_counts())
    found.seconds = time.perf_counter() - began
    return found


def _stripped(request: Request) -> Request:
    """The request without anything that ends or chooses an output but its lengths; its id is the runner's key."""
    asked = request.params
    params = GenerationParams(
        n=asked.n,
        best_of=asked.best_of,
        num_beams=asked.num_beams,
        num_beam_groups=asked.num_beam_groups,
        early_stopping=True,
        temperature=asked.temperature,
        max_tokens=asked.max_tokens,
        prompt_logprobs=asked.prompt_logprobs,
        seed=request.request_id,
    )
    return replace(request, params=params, rng_key=request.request_id, constraint=None)


def simulation_stats(found: Simulated, settings: dict[str, Setting]) -> Stats:
    """The stats, for the reports of a run; `seconds` are those of the simulation, not of a model."""
    return Stats(
        simulated=True,
        settings=settings,
        versions={"pagedbatch": __version__},
        rows=RowCounts(total=found.num_ok + found.num_error, ok=found.num_ok, error=found.num_error, resumed=0),
        throughput=Throughput.of(
            startup_seconds=0.0,
            seconds=found.seconds,
            steps=found.num_steps,
            prompt_tokens=found.prompt_tokens,
            output_tokens=found.output_tokens,
        ),
        memory=found.account.memory(),
        time=found.account.time(),
        lengths=found.account.lengths(),
        timeline=found.account.timeline(),
    )

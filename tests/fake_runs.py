"""Runs requests through a real engine and the fake runner, with every invariant checked in every step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from fake_runner import FakeRunner

from pagedbatch.config import EngineConfig
from pagedbatch.engine.engine import Engine, Runner
from pagedbatch.outputs import CompletionOutput, EngineCounters, RequestOutput, StepSnapshot
from pagedbatch.params import GenerationParams
from pagedbatch.sequence import Request
from pagedbatch.step import SchedulerOutput

EOS = 0
VOCABULARY = 11


def request(request_id: int, prompt: int | list[int], *, priority: int = 0, **params: Any) -> Request:
    """A request with `prompt` as its token ids, or as many tokens that no other request has."""
    if isinstance(prompt, int):
        prompt = [1000 * (request_id + 1) + i for i in range(prompt)]
    if params.get("n", 1) > 1 and params.get("num_beams", 1) == 1:
        params.setdefault("temperature", 1.0)
    return Request(request_id, prompt, GenerationParams(**params), rng_key=request_id, priority=priority)


def blocks_at_most(request: Request, block_size: int) -> int:
    """What a request holds at its largest, block by block: one whose tokens all come from the prompt is held once."""
    stored = len(request.prompt_token_ids) + request.params.max_tokens - 1
    width = request.params.width
    ends = range(block_size, stored + block_size, block_size)
    return sum(1 if end <= len(request.prompt_token_ids) else width for end in ends)


def letters(token_ids: list[int], skip_special_tokens: bool) -> str:
    """A detokenizer: one letter a token, nothing for the end token."""
    return "".join(chr(ord("a") + token_id) for token_id in token_ids if token_id != EOS)


@dataclass
class FakeRun:
    """An engine with its runner, and all that it gave back so far."""

    engine: Engine
    runner: FakeRunner
    outputs: dict[int, RequestOutput] = field(default_factory=dict)
    snapshots: list[StepSnapshot] = field(default_factory=list)
    steps_may_fail: bool = False

    @property
    def counters(self) -> EngineCounters:
        return self.snapshots[-1].counters

    @property
    def steps(self) -> list[SchedulerOutput]:
        return self.runner.steps

    def add(self, *requests: Request) -> None:
        for each in requests:
            self.engine.add(each)

    def step(self) -> list[RequestOutput]:
        result = self.engine.step()
        assert result.snapshot is not None
        self._check(result.snapshot)
        self.snapshots.append(result.snapshot)
        self.outputs |= {output.request_id: output for output in result.finished}
        return list(result.finished)

    def drain(self) -> FakeRun:
        """Until nothing is left; then all blocks must be back."""
        while self.engine.has_unfinished:
            self.step()
        assert self.engine.pool_counts().live == 0
        assert self.engine.scheduler.blocks.swap_pool.num_live == 0
        return self

    def answers(self) -> dict[int, list[CompletionOutput] | str]:
        """The outputs of each row, or its error."""
        return {row: output.error or output.outputs for row, output in sorted(self.outputs.items())}

    def running_ids(self) -> list[int]:
        return [group.request.request_id for group in self.engine.scheduler.running]

    def tables(self, request_id: int) -> list[list[int]]:
        """The block tables of a running request."""
        scheduler = self.engine.scheduler
        group = next(group for group in scheduler.running if group.request.request_id == request_id)
        return [list(scheduler.blocks.block_table(seq.seq_id)) for seq in group.sequences]

    def _check(self, snapshot: StepSnapshot) -> None:
        pool, config = snapshot.pool, self.engine.config
        # An assertion of the fake runner is a failed step to the engine.
        assert self.steps_may_fail or snapshot.counters.failed_steps == 0
        assert pool.private + pool.shared + pool.cached + pool.free == config.num_blocks
        assert min(pool.private, pool.shared, pool.cached, pool.free) >= 0
        assert pool.filled_slots <= pool.live * config.block_size
        assert pool.logical >= pool.live + pool.shared


def fake_engine(
    *,
    num_blocks: int = 120,
    block_size: int = 4,
    num_swap_blocks: int = 0,
    runner: Runner | None = None,
    **settings: Any,
) -> FakeRun:
    """An empty engine. `runner` stands in for the fake one."""
    fake = FakeRunner(num_blocks, block_size, num_swap_blocks, VOCABULARY)
    config = EngineConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        num_swap_blocks=num_swap_blocks,
        eos_token_ids=frozenset({EOS}),
        check_invariants=True,
        **settings,
    )
    return FakeRun(Engine(config, runner or fake, letters), fake, steps_may_fail=runner is not None)


def fake_run(requests: Iterable[Request], **settings: Any) -> FakeRun:
    """Runs all requests to the end."""
    run = fake_engine(**settings)
    run.add(*requests)
    return run.drain()

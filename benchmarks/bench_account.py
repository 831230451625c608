"""What the account costs per step: `python benchmarks/bench_account.py MODEL [ROWS]`. For a quiet machine, by hand.

Runs ROWS (128) rows of the real model at once and times, in the same run, all that is done for the account alone: the
pool's counts, the map of the peak, what `MemoryAccount` takes in. Prints its share of the time of the steps.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from pagedbatch.config import EngineConfig
from pagedbatch.engine.engine import Engine
from pagedbatch.model.loader import load_model
from pagedbatch.model.runner import ModelRunner
from pagedbatch.params import GenerationParams
from pagedbatch.sequence import Request
from pagedbatch.stats.memory import MemoryAccount

PROMPT, OUTPUT, BLOCK = 64, 64, 16


class Stopwatch:
    """Adds up the time of the calls that go through it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = call(*arguments)
            self.seconds += time.perf_counter() - began
            return result

        return timed


def main(model: str, rows: str = "128") -> None:
    torch.set_num_threads(2)
    num_rows = int(rows)
    num_blocks = num_rows * (PROMPT + OUTPUT) // BLOCK
    runner = ModelRunner.create(load_model(model, dtype="auto", device="cpu"), num_blocks=num_blocks, keep_model=False)
    engine = Engine(EngineConfig(num_blocks=num_blocks, block_size=BLOCK, max_num_seqs=num_rows), runner)
    account = MemoryAccount(num_blocks=num_blocks, block_size=BLOCK, block_bytes=1)
    clock = Stopwatch()
    engine.pool_counts = clock.around(engine.pool_counts)  # type: ignore[method-assign]
    engine._map_blocks = clock.around(engine._map_blocks)  # type: ignore[method-assign]
    observe, row_finished = clock.around(account.observe), clock.around(account.row_finished)

    draw = random.Random(0)
    params = GenerationParams(max_tokens=OUTPUT, ignore_eos=True)
    for row in range(num_rows):
        engine.add(Request(row, [draw.randrange(1000) for _ in range(PROMPT)], params, row))
    steps, began = 0, time.perf_counter()
    while engine.has_unfinished:
        step = engine.step()
        observe(step.snapshot)
        for output in step.finished:
            row_finished(output, params, engine.config.max_model_len)
        steps += 1
    seconds = time.perf_counter() - began
    print(f"{num_rows} rows, {steps} steps of {1000 * seconds / steps:.1f} ms")
    print(f"the account: {1e6 * clock.seconds / steps:.0f} us per step, {clock.seconds / seconds:.3%}")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""What a step of a wide beam search costs outside the model. No test runs it.

    PYTHONPATH=tests python benchmarks/bench_beams.py

One prompt on a tiny model, at two widths, early and late in the search. Processor time on one core, so that a busy
machine changes little: `outside` is a step without the model's forward, `host` is its part before and after the runner
(scheduling, ranking, forking), the rest is the batch's tensors, block copies and the ranking on the device. Figures are
medians over 20 steps; what counts is the ratios.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from models import rand_model

from pagedbatch.config import EngineConfig
from pagedbatch.engine.engine import Engine
from pagedbatch.model.loader import LoadedModel, load_model
from pagedbatch.model.runner import ModelRunner
from pagedbatch.params import GenerationParams
from pagedbatch.sequence import Request
from pagedbatch.step import ModelRunnerOutput, SchedulerOutput

WIDTHS = (64, 512)
TOKENS = (50, 400)
MOST_TOKENS = 411
PROMPT = list(range(10, 30))


@dataclass
class Clock:
    """Processor seconds spent in one place since it was last read."""

    seconds: float = 0.0
    began: float = field(default_factory=time.process_time)

    def start(self, *_: Any) -> None:
        self.began = time.process_time()

    def stop(self, *_: Any) -> None:
        self.seconds += time.process_time() - self.began

    def read(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds


@dataclass
class TimedRunner:
    runner: ModelRunner
    clock: Clock

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self.clock.start()
        result = self.runner.execute(step)
        self.clock.stop()
        return result


def search(loaded: LoadedModel, num_beams: int) -> tuple[list[float], list[float]]:
    """Milliseconds of each step: outside the model, and on the host."""
    num_blocks = num_beams * (MOST_TOKENS // 16 + 3)
    model_clock, runner_clock = Clock(), Clock()
    hooks = [
        loaded.model.register_forward_pre_hook(model_clock.start),
        loaded.model.register_forward_hook(model_clock.stop),
    ]
    runner = TimedRunner(ModelRunner.create(loaded, attention="torch", num_blocks=num_blocks), runner_clock)
    engine = Engine(EngineConfig(num_blocks=num_blocks, max_num_seqs=num_beams), runner)
    params = GenerationParams(num_beams=num_beams, max_tokens=MOST_TOKENS, ignore_eos=True)
    engine.add(Request(0, PROMPT, params))
    outside, host = [], []
    while engine.has_unfinished:
        began = time.process_time()
        engine.step()
        whole = time.process_time() - began
        outside.append(1e3 * (whole - model_clock.read()))
        host.append(1e3 * (whole - runner_clock.read()))
    for hook in hooks:
        hook.remove()
    return outside, host


def around(milliseconds: list[float], token: int) -> float:
    return statistics.median(milliseconds[token - 10 : token + 10])


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rand_model(Path(folder))
        loaded = load_model(folder, dtype="float32", device="cpu")
    found: dict[str, dict[tuple[int, int], float]] = {"outside": {}, "host": {}}
    for width in WIDTHS:
        for name, milliseconds in zip(found, search(loaded, width), strict=True):
            for token in TOKENS:
                found[name][width, token] = around(milliseconds, token)
                print(f"{name:8}{width:4} beams, token {token:3}: {found[name][width, token]:7.2f} ms a step")
    narrow, wide = WIDTHS
    early, late = TOKENS
    for name, times in found.items():
        for token in TOKENS:
            ratio = times[wide, token] / times[narrow, token]
            print(f"{name:8}{wide} beams / {narrow} beams, token {token}: {ratio:.2f}")
        for width in WIDTHS:
            ratio = times[width, late] / times[width, early]
            print(f"{name:8}token {late} / token {early}, {width} beams: {ratio:.2f}")


if __name__ == "__main__":
    main()

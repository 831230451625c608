"""How much memory the beams of a real search share, and how their ancestors meet. No test runs it.

    python benchmarks/beam_sharing.py MODEL PROMPTS.jsonl [ROWS [WIDTHS...]]

Runs real searches of widths 2, 4 and 6, of log-normal lengths with the mean of the paper's Alpaca trace, and prints the
saving beside the paper's (PagedAttention, arXiv 2309.06180, figure 15: OPT-13B). From the same searches it measures
from how many different beams the survivors of a step descend, 1, 2, 4, ... steps back: what the genealogies of
`pagedbatch.tools.simulate` are fitted to. Theirs, and the saving that a simulation of the same lengths
gives, stand beside.
"""

from __future__ import annotations

import json
import math
import random
import sys
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from pagedbatch.config import EngineConfig
from pagedbatch.engine.engine import Engine
from pagedbatch.model.loader import load_model
from pagedbatch.model.runner import ModelRunner
from pagedbatch.model.tokenizer import load_tokenizer
from pagedbatch.params import GenerationParams
from pagedbatch.sequence import Request
from pagedbatch.stats.memory import MemoryAccount
from pagedbatch.step import ModelRunnerOutput, SchedulerOutput
from pagedbatch.tools.simulate.simulate import simulate
from pagedbatch.tools.simulate.trace import RequestLengths, script_trace

PAPER = {2: 0.3756, 4: 0.5313, 6: 0.5516}
DISTANCES = (1, 2, 4, 8, 16, 32)
MEAN_OUTPUT, SIGMA, MOST = 58.45, 1.0, 160
NUM_BLOCKS = 2000
CONFIG = EngineConfig(num_blocks=NUM_BLOCKS, max_num_seqs=64, prefix_cache=False)


@dataclass
class Recorder:
    """A runner that notes the parents of each step's survivors, by search. No end tokens: the best survive."""

    runner: Any
    parents: dict[int, list[list[int]]] = field(default_factory=dict)

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        result: ModelRunnerOutput = self.runner.execute(step)
        for task, ranked in zip(step.beams, result.beams, strict=True):
            survivors = ranked.parents[: task.params.num_beams]
            self.parents.setdefault(task.params.seed, []).append(survivors)
        return result


def search(runner: Any, lengths: list[tuple[list[int], int]], num_beams: int) -> tuple[float, Recorder]:
    """The sharing saving of a run, blocks saved / blocks without sharing, and the searches' genealogies."""
    recorder = Recorder(runner)
    engine = Engine(CONFIG, recorder)
    account = MemoryAccount(num_blocks=NUM_BLOCKS, block_size=16, block_bytes=1)
    for row, (prompt, output) in enumerate(lengths):
        params = GenerationParams(num_beams=num_beams, max_tokens=output, ignore_eos=True, seed=row)
        engine.add(Request(row, prompt, params))
    while engine.has_unfinished:
        snapshot = engine.step().snapshot
        assert snapshot is not None
        account.observe(snapshot)
    return saved(account), recorder


def saved(account: MemoryAccount) -> float:
    memory = account.memory()
    return 1 - memory.mean_live_blocks / memory.mean_logical_blocks


def lineages(generations: list[list[int]], distance: int) -> float:
    """From how many beams those of a step descend, `distance` steps back: the mean over the steps of one search.

    `generations[t]` names the parent of each survivor of step t; there are more than `distance` steps.
    """
    counts = []
    for last in range(distance, len(generations)):
        ancestors = set(range(len(generations[last])))
        for step in range(last, last - distance, -1):
            ancestors = {generations[step][beam] for beam in ancestors}
        counts.append(len(ancestors))
    return sum(counts) / len(counts)


def ancestors(recorder: Recorder, distance: int) -> str:
    """The mean over searches, each weighted by its steps that have at least `distance` before them."""
    runs = [parents for parents in recorder.parents.values() if len(parents) > distance]
    weights = [len(parents) - distance for parents in runs]
    total = sum(weight * lineages(parents, distance) for parents, weight in zip(runs, weights, strict=True))
    return f"{total / sum(weights):.2f}" if runs else "-"


def load(model: str) -> tuple[Any, Any]:
    """The model's runner and its tokenizer."""
    torch.set_num_threads(2)
    loaded = load_model(model, dtype="auto", device="cpu")
    return ModelRunner.create(loaded, num_blocks=NUM_BLOCKS, keep_model=False), load_tokenizer(model)


def scripted(tokenizer: Any, prompts: str, count: int) -> list[tuple[list[int], int]]:
    """The token ids of real prompts, and how long each one's output shall be."""
    rows = map(json.loads, islice(Path(prompts).read_text(encoding="utf-8").splitlines(), count))
    texts = [row.get("prompt") or row.get("turns", [None])[0] or row["instruction"] for row in rows]
    rng = random.Random(0)
    mu = math.log(MEAN_OUTPUT) - SIGMA**2 / 2
    return [(tokenizer(text)["input_ids"], min(MOST, max(2, round(rng.lognormvariate(mu, SIGMA))))) for text in texts]


def main(model: str, prompts: str, count: str = "40", *widths: str) -> None:
    runner, tokenizer = load(model)
    lengths = scripted(tokenizer, prompts, int(count))
    mean_in, mean_out = (sum(each) / len(lengths) for each in zip(*((len(p), o) for p, o in lengths), strict=True))
    print(f"{len(lengths)} prompts, {mean_in:.1f} tokens in, {mean_out:.1f} out")
    for num_beams, paper in PAPER.items():
        if widths and str(num_beams) not in widths:
            continue
        saving, recorder = search(runner, lengths, num_beams)
        trace = [RequestLengths(len(prompt), output) for prompt, output in lengths]
        simulated = simulate(script_trace(trace, CONFIG.max_model_len, num_beams=num_beams), CONFIG)
        print(
            f"{num_beams} beams: saving {saving:.1%}, paper {paper:.1%}, simulated {saved(simulated.account):.1%}; "
            f"ancestors {DISTANCES} steps back: {' '.join(ancestors(recorder, each) for each in DISTANCES)}",
            flush=True,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])

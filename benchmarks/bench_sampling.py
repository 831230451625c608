"""What drawing costs beside the model: host and sampling time as shares of a decode step. For a quiet machine, by hand.

    python benchmarks/bench_sampling.py MODEL PROMPTS.jsonl [ROWS]

Medians over the decode steps of ROWS (128) rows, whose prompts are those of the file, over and over. Real text matters:
after random tokens the model is unsure of the next one, and the nucleus is as large as the vocabulary.
"""

from __future__ import annotations

import json
import statistics
import sys
from itertools import cycle, islice
from pathlib import Path

from pagedbatch.config import EngineConfig
from pagedbatch.engine.engine import Engine
from pagedbatch.model.loader import LoadedModel, load_model
from pagedbatch.model.runner import ModelRunner
from pagedbatch.model.tokenizer import load_tokenizer
from pagedbatch.outputs import StepSnapshot
from pagedbatch.params import GenerationParams
from pagedbatch.sequence import Request

CASES = {
    "greedy": GenerationParams(max_tokens=16, ignore_eos=True),
    "temperature 1": GenerationParams(temperature=1.0, max_tokens=16, ignore_eos=True),
    "top-k 50": GenerationParams(temperature=1.0, top_k=50, max_tokens=16, ignore_eos=True),
    "top-p 0.95": GenerationParams(temperature=1.0, top_p=0.95, max_tokens=16, ignore_eos=True),
    "top-p 0.95, logprobs 5": GenerationParams(temperature=1.0, top_p=0.95, logprobs=5, max_tokens=16, ignore_eos=True),
    "repetition penalty": GenerationParams(repetition_penalty=1.2, max_tokens=16, ignore_eos=True),
}


def main(model: str, prompts_file: str, rows: str = "128") -> None:
    loaded = load_model(model, dtype="auto", device="auto")
    encode = load_tokenizer(model)
    texts = [json.loads(line)["prompt"] for line in Path(prompts_file).read_text(encoding="utf-8").splitlines()]
    prompts = [encode(text).input_ids for text in islice(cycle(texts), int(rows))]
    print(f"{'':24} step ms   model  attention  sampling    host   sampling and host")
    for name, params in CASES.items():
        steps = decode_steps(loaded, params, prompts)
        median = {
            part: statistics.median(getattr(step.seconds, part) for step in steps)
            for part in ("model", "attention", "sampling")
        }
        median["host"] = statistics.median(step.host_seconds for step in steps)
        whole = statistics.median(step.step_seconds for step in steps)
        parts = "  ".join(f"{seconds * 1000:8.1f}" for seconds in median.values())
        print(f"{name:24} {whole * 1000:7.1f}{parts} {(median['sampling'] + median['host']) / whole:12.1%}")


def decode_steps(loaded: LoadedModel, params: GenerationParams, prompts: list[list[int]]) -> list[StepSnapshot]:
    """The steps in which every row draws one token."""
    rows = len(prompts)
    runner = ModelRunner.create(loaded, num_blocks=sum(len(prompt) // 16 + 3 for prompt in prompts))
    config = EngineConfig(num_blocks=runner.num_blocks, max_num_seqs=rows, max_num_batched_tokens=4096)
    engine = Engine(config, runner)
    for row, prompt in enumerate(prompts):
        engine.add(Request(row, prompt, params, rng_key=row))
    steps = []
    while engine.has_unfinished:
        snapshot = engine.step().snapshot
        if snapshot is not None and snapshot.num_tokens == rows:
            steps.append(snapshot)
    return steps


if __name__ == "__main__":
    main(*sys.argv[1:])

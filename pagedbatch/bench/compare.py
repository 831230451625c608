"""One sitting: every job on both sides, a few times ours, and the figures side by side. Knows no terminal."""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedbatch.bench.dummy import dummy_prompts, make_dummy_model
from pagedbatch.bench.ours import run_ours
from pagedbatch.bench.processes import run_python
from pagedbatch.bench.workload import BenchJob, Prompt, built_in_prompts, read_prompts, write_prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """What is to be measured.

    `prompts` is an input of `pagedbatch run`, None for the built-in ones; with `dummy_weights`, `model` is a config and
    prompts are `dummy_length` random tokens. `run_flags` are settings of `pagedbatch run`. `generate_seconds` bounds
    Hugging Face's side of each job; None leaves it out.
    """

    model: str
    jobs: Sequence[BenchJob]
    prompts: str | None = None
    num_prompts: int = 32
    repeats: int = 3
    dummy_weights: bool = False
    dummy_length: int = 256
    batch_sizes: Sequence[int] = (1, 4, 16, 32)
    generate_seconds: float | None = 120.0
    run_flags: Mapping[str, Any]


def compare(plan: BenchPlan, notice: Callable[[str], None]) -> dict[str, Any]:
    """Measures everything and returns it, ready for JSON; `notice` takes a line as each part begins.

    Raises:
        UsageError: no such model or prompts.
        RunError: a side failed; the message says which and why.
    """
    import torch

    from pagedbatch.job.run_stats import versions

    with tempfile.TemporaryDirectory(prefix="pagedbatch-bench-") as name:
        folder = Path(name)
        model, prompts = _model_and_prompts(plan, folder, notice)
        rows = folder / "prompts.jsonl"
        write_prompts(prompts, rows)
        flags = {**plan.run_flags, "model": model}
        jobs = []
        for job in plan.jobs:
            runs = []
            for repeat in range(plan.repeats):
                notice(f"{job.name}: pagedbatch, {repeat + 1} of {plan.repeats}")
                runs.append(run_ours(job, rows, len(prompts), flags, folder))
            theirs = None
            if plan.generate_seconds is not None:
                notice(f"{job.name}: transformers generate, at most about {plan.generate_seconds:.0f} s")
                theirs = _run_generate(job, plan, rows, model, runs[0]["used"], folder)
            jobs.append(_side_by_side(job, runs, theirs))
        used = jobs[0]["pagedbatch"]["used"]
        weight_bytes = _weight_bytes(Path(model), 4 if used["dtype"] == "float32" else 2)
    return {
        "model": plan.model,
        "dummy_weights": plan.dummy_weights,
        "dtype": used["dtype"],
        "device": used["device"],
        "threads": torch.get_num_threads(),
        "prompts": len(prompts),
        "weight_bytes": weight_bytes,
        "versions": versions(),
        "jobs": jobs,
    }


def _model_and_prompts(plan: BenchPlan, folder: Path, notice: Callable[[str], None]) -> tuple[str, list[Prompt]]:
    model = plan.model
    if plan.dummy_weights:
        notice("making random weights")
        model = str(folder / "model")
        dtype = plan.run_flags["dtype"]
        vocab_size = make_dummy_model(plan.model, folder / "model", "bfloat16" if dtype == "auto" else dtype)
        if plan.prompts is None:
            return model, dummy_prompts(plan.num_prompts, plan.dummy_length, vocab_size)
    if plan.prompts is None:
        return model, built_in_prompts(plan.num_prompts)
    return model, read_prompts(plan.prompts, plan.num_prompts)


def _run_generate(
    job: BenchJob, plan: BenchPlan, rows: Path, model: str, used: Mapping[str, str], folder: Path
) -> dict[str, Any]:
    """Hugging Face's side, on the device and in the precision that our side `used`."""
    spec = {
        "model": model,
        "dtype": used["dtype"],
        "device": used["device"],
        "prompts": str(rows),
        "kwargs": job.generate_kwargs,
        "batch_sizes": list(plan.batch_sizes),
        "most_seconds": plan.generate_seconds,
    }
    spec_file, result_file = folder / "spec.json", folder / "result.json"
    spec_file.write_text(json.dumps(spec), encoding="utf-8")
    cost = run_python(
        ["-m", "pagedbatch.bench.generate", str(spec_file), str(result_file)], f"transformers generate ({job.name})"
    )
    result: dict[str, Any] = json.loads(result_file.read_text(encoding="utf-8"))
    return {**result, "peak_bytes": cost.peak_bytes}


def _side_by_side(job: BenchJob, runs: Sequence[dict[str, Any]], theirs: dict[str, Any] | None) -> dict[str, Any]:
    """A job's figures: ours are those of the run with the median speed."""
    median = statistics.median_low(run["tokens_per_second"] for run in runs)
    ours = next(run for run in runs if run["tokens_per_second"] == median)
    return {
        "name": job.name,
        "n": job.n,
        "num_beams": job.num_beams,
        "max_tokens": job.max_tokens,
        "pagedbatch": ours,
        "tokens_per_second_of_all_runs": [run["tokens_per_second"] for run in runs],
        "generate": theirs,
        "ratio": None if theirs is None else round(ours["tokens_per_second"] / theirs["tokens_per_second"], 3),
    }


def _weight_bytes(model: Path, itemsize: int) -> int | None:
    """What the weights take in memory, from the headers of the safetensors files; None where there are none."""
    from safetensors import safe_open

    if not model.is_dir():
        return None
    count = 0
    for file in model.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            names = tensors.keys()
            count += sum(math.prod(tensors.get_slice(name).get_shape()) for name in names)
    return count * itemsize or None

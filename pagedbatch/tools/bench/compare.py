"""One sitting: every job on both sides, a few times ours, and the figures side by side. Knows no terminal.

Nothing is loaded in this process: see `processes`.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedbatch.errors import RunError
from pagedbatch.output.stats_file import versions
from pagedbatch.tools.bench.ours import run_ours
from pagedbatch.tools.bench.processes import ask
from pagedbatch.tools.bench.workload import BenchJob, built_in_prompts, read_prompts, write_prompts

#: The prompts as `pagedbatch run` reads them, in the folder of the sitting.
_ROWS = "rows.jsonl"


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

    An interrupt leaves the jobs that were measured whole, and says so; without any it is raised.

    Raises:
        UsageError: no such model or prompts.
        RunError: our side failed. If `generate` does, the result says so in its place.
    """
    with tempfile.TemporaryDirectory(prefix="pagedbatch-bench-") as name:
        folder = Path(name)
        ready = _prepare(plan, folder, notice)
        jobs: list[dict[str, Any]] = []
        interrupted = False
        try:
            for job in plan.jobs:
                jobs.append(_measure(job, plan, ready, folder, notice))
        except KeyboardInterrupt:
            if not jobs:
                raise
            interrupted = True
    return {
        "model": plan.model,
        "dummy_weights": plan.dummy_weights,
        "dtype": ready["dtype"],
        "device": ready["device"],
        "threads": ready["threads"],
        "prompts": ready["num_prompts"],
        "weight_bytes": ready["weight_bytes"],
        "versions": versions(),
        "interrupted": interrupted,
        "jobs": jobs,
    }


def _measure(
    job: BenchJob, plan: BenchPlan, ready: Mapping[str, Any], folder: Path, notice: Callable[[str], None]
) -> dict[str, Any]:
    """One job, our runs first."""
    flags = {**plan.run_flags, "model": ready["model"]}
    runs = []
    for repeat in range(plan.repeats):
        notice(f"{job.name}: pagedbatch, {repeat + 1} of {plan.repeats}")
        runs.append(run_ours(job, folder / _ROWS, ready["num_prompts"], flags, folder))
    theirs = None
    if plan.generate_seconds is not None:
        notice(f"{job.name}: transformers generate, at most about {plan.generate_seconds:.0f} s")
        theirs = _run_generate(job, plan, ready)
    return _side_by_side(job, runs, theirs)


def _prepare(plan: BenchPlan, folder: Path, notice: Callable[[str], None]) -> dict[str, Any]:
    """Writes the rows, and has model and prompts checked; see `bench.prepare`."""
    count = plan.num_prompts
    rows = built_in_prompts(count) if plan.prompts is None else read_prompts(plan.prompts, count)
    write_prompts(rows, folder / _ROWS)
    notice("making random weights" if plan.dummy_weights else "checking the model and the prompts")
    question = {
        "model": plan.model,
        "run_flags": dict(plan.run_flags),
        "rows": str(folder / _ROWS),
        "own_prompts": plan.prompts is not None,
        "num_prompts": count,
        "max_tokens": max(job.max_tokens for job in plan.jobs),
        "dummy_weights": plan.dummy_weights,
        "dummy_length": plan.dummy_length,
        "folder": str(folder),
    }
    ready = ask("pagedbatch.tools.bench.prepare", question, "the check of the model").values
    if ready["num_prompts"] < count:
        notice(f"there are {ready['num_prompts']} prompts, fewer than --num-prompts {count}")
    return ready


def _run_generate(job: BenchJob, plan: BenchPlan, ready: Mapping[str, Any]) -> dict[str, Any]:
    """Hugging Face's side, on the same device, in the same precision and on the same token ids.

    `error` says why there are no figures, where there are none: ours are worth having also then.
    """
    question = {
        "model": ready["model"],
        "dtype": ready["dtype"],
        "device": ready["device"],
        "prompts": ready["prompts"],
        "kwargs": job.generate_kwargs,
        "batch_sizes": list(plan.batch_sizes),
        "most_seconds": plan.generate_seconds,
    }
    try:
        answer = ask("pagedbatch.tools.bench.generate", question, f"transformers generate ({job.name})")
    except RunError as error:
        return {"error": str(error)}
    return {**answer.values, "peak_bytes": answer.cost.peak_bytes}


def _side_by_side(job: BenchJob, runs: Sequence[dict[str, Any]], theirs: dict[str, Any] | None) -> dict[str, Any]:
    """A job's figures: ours are those of the run with the median speed."""
    median = statistics.median_low(run["tokens_per_second"] for run in runs)
    ours = next(run for run in runs if run["tokens_per_second"] == median)
    ratio = None
    if theirs is not None and "error" not in theirs:
        ratio = round(ours["tokens_per_second"] / theirs["tokens_per_second"], 3)
    return {
        "name": job.name,
        "n": job.n,
        "num_beams": job.num_beams,
        "max_tokens": job.max_tokens,
        "pagedbatch": ours,
        "tokens_per_second_of_all_runs": [run["tokens_per_second"] for run in runs],
        "generate": theirs,
        "ratio": ratio,
    }

"""Every job with `pagedbatch run`, a few times, and with Hugging Face's `generate`, and the figures side by side.

This process loads no model: see `processes`.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedbatch.errors import RunError
from pagedbatch.output.stats_file import read_stats, versions
from pagedbatch.tools.bench.processes import ask, run_python
from pagedbatch.tools.bench.workload import BenchJob, built_in_prompts, read_prompts, write_prompts

#: The file of prompts, in a temporary folder.
_ROWS = "rows.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """What to measure.

    `prompts` is an input of `pagedbatch run`, None for the built-in ones; with `dummy_weights`, `model` is a config and
    prompts are `dummy_length` random tokens. `run_flags` are settings of `pagedbatch run`. `generate_seconds` limits
    `generate` in each job; None leaves it out.
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

    After an interrupt, the result has the jobs that were measured completely; if there are none, it is raised.

    Raises:
        UsageError: no such model or prompts.
        RunError: `pagedbatch run` failed. If `generate` fails, the result has its error instead of its figures.
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
        runs.append(run_pagedbatch(job, folder / _ROWS, ready["num_prompts"], flags, folder))
    theirs = None
    if plan.generate_seconds is not None:
        notice(f"{job.name}: transformers generate, at most about {plan.generate_seconds:.0f} s")
        theirs = _run_generate(job, plan, ready)
    return _side_by_side(job, runs, theirs)


def run_pagedbatch(
    job: BenchJob, prompts: Path, num_prompts: int, flags: Mapping[str, Any], folder: Path
) -> dict[str, Any]:
    """Runs one job once with `pagedbatch run`, including reading, tokenising and writing.

    Args:
        prompts: a file of `num_prompts` rows.
        flags: settings of `pagedbatch run` by their names; None leaves one at its default.
        folder: where the output may be written.

    Returns:
        `output_tokens`, `seconds` from the first step to the last row, `startup_seconds` for the rest of the process,
        `tokens_per_second`, `peak_bytes`, and the account's `time` and `memory` figures.

    Raises:
        RunError: it failed, or wrote another number of tokens than was asked for.
    """
    output = folder / f"{job.name}.jsonl"
    settings = {**flags, **job.generation, "output": str(output)}
    arguments = ["-c", "from pagedbatch.cli.app import main; main()", "run", str(prompts), "--restart"]
    for name, value in settings.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            arguments.append(flag)
        elif value is not None and value is not False:
            arguments += [flag, str(value)]
    cost = run_python(arguments, f"pagedbatch run ({job.name})")
    stats = read_stats(output.with_suffix(".stats.json"))
    throughput, memory = stats.throughput, stats.memory
    assert memory is not None
    expected = num_prompts * job.n * job.max_tokens
    if throughput.output_tokens != expected:
        raise RunError(
            f"{job.name}: {throughput.output_tokens} tokens were written, not {expected}: a prompt leaves less room "
            "than --max-tokens in the model's context, or the pool is too small for a row"
        )
    return {
        "output_tokens": expected,
        "prompt_tokens": throughput.prompt_tokens,
        "seconds": throughput.seconds,
        "startup_seconds": round(cost.seconds - throughput.seconds, 3),
        "tokens_per_second": throughput.output_tokens_per_second,
        "peak_bytes": cost.peak_bytes,
        "pool_bytes": memory.pool_bytes,
        "pool_bytes_used": memory.peak_live_blocks * memory.block_bytes,
        "sharing_saving": memory.sharing_saving,
        "time": stats.time.parts(),
        "used": {name: stats.settings[name].used for name in ("attention", "forward", "device", "dtype")},
    }


def _prepare(plan: BenchPlan, folder: Path, notice: Callable[[str], None]) -> dict[str, Any]:
    """Writes the prompts, and has them and the model checked; see `bench.prepare`."""
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
    """`generate` on the same device, in the same precision and on the same token ids.

    If it fails, there is only its `error`: the figures of `pagedbatch` are still worth having.
    """
    question = {
        "model": ready["model"],
        "dtype": ready["dtype"],
        "device": ready["device"],
        "prompts": ready["prompts"],
        "kwargs": job.generate_kwargs,
        "batch_sizes": list(plan.batch_sizes),
        "max_seconds": plan.generate_seconds,
    }
    try:
        answer = ask("pagedbatch.tools.bench.generate", question, f"transformers generate ({job.name})")
    except RunError as error:
        return {"error": str(error)}
    return {**answer.values, "peak_bytes": answer.cost.peak_bytes}


def _side_by_side(job: BenchJob, runs: Sequence[dict[str, Any]], theirs: dict[str, Any] | None) -> dict[str, Any]:
    """The figures of a job; those of `pagedbatch` are from the run with the median speed."""
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

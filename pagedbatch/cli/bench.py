"""`pagedbatch bench`: `pagedbatch run` against Hugging Face's `generate` on this machine."""

from __future__ import annotations

import json
from dataclasses import MISSING, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pagedbatch.cli.flags import takes_options, values_of
from pagedbatch.cli.terminal import say
from pagedbatch.errors import ExitCode, UsageError
from pagedbatch.options import option, options_of
from pagedbatch.params import MAX_WIDTH
from pagedbatch.printable import printable_values
from pagedbatch.readers import boolean, count, integer, new_file, number, text
from pagedbatch.run.interrupts import Interrupts
from pagedbatch.settings import OPTIONS

_job = partial(option, group="Job")
_generate = partial(option, group="Comparison with Hugging Face's generate")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What `bench` is told beside the options of its runs."""

    prompts: str | None = _job(None, text, "File of rows with prompts.", is_argument=True, default_text="built-in ones")
    model: str = _job(MISSING, text, "Hub id or folder; with --dummy-weights, a config.json or its folder.", short="-m")
    dummy_weights: bool = _job(False, boolean, "Random weights, made from the config alone: to size a machine.")
    dummy_length: int = _job(256, count, "Tokens per random prompt with --dummy-weights.")
    jobs: str = _job(
        "greedy,sampling,beams", text, "What to measure: one or several of greedy, sampling and beams.", metavar="NAMES"
    )
    num_prompts: int = _job(32, count, "Maximum prompts per job.")
    max_tokens: int = _job(64, count, "Tokens per output. End tokens are ignored, so that all have as many.")
    n: int = _job(8, integer(2, MAX_WIDTH), "Outputs per prompt in the sampling job.", short="-n")
    num_beams: int = _job(4, integer(2, MAX_WIDTH), "Beams per prompt in the beams job.")
    repeats: int = _job(3, count, "Runs of pagedbatch per job; the median counts.")
    json: str | None = _job(None, new_file, "Write all figures to this file.")
    generate: bool = _generate(True, boolean, "Measure generate too.")
    batch_sizes: str = _generate("1,4,16,32", text, "Batch sizes to try; the fastest one counts.", metavar="SIZES")
    generate_seconds: float = _generate(
        120.0, number(1, 1e9, metavar="SECONDS"), "Time per job. It answers as many prompts as fit."
    )


_OPTIONS = options_of(BenchOptions)
_OF_THE_RUNS = {name: OPTIONS[name] for name in (
    "kv_memory", "max_num_seqs", "device", "dtype", "attention", "forward",
)}  # fmt: skip


@takes_options(*_OPTIONS.values(), *_OF_THE_RUNS.values())
def bench(**flags: Any) -> int:
    """Measure this machine: output tokens per second here and with Hugging Face's generate, memory, time by part."""
    from rich.console import Console

    from pagedbatch.tools.bench.compare import BenchPlan, compare
    from pagedbatch.tools.bench.table import print_comparison
    from pagedbatch.tools.bench.workload import choose_jobs

    own = BenchOptions(**values_of(_OPTIONS, flags))
    plan = BenchPlan(
        model=own.model,
        jobs=choose_jobs(_names(own.jobs), n=own.n, num_beams=own.num_beams, max_tokens=own.max_tokens),
        prompts=own.prompts,
        num_prompts=own.num_prompts,
        repeats=own.repeats,
        dummy_weights=own.dummy_weights,
        dummy_length=own.dummy_length,
        batch_sizes=_sizes(own.batch_sizes),
        generate_seconds=own.generate_seconds if own.generate else None,
        run_flags=values_of(_OF_THE_RUNS, flags),
    )
    try:
        with Interrupts():
            result = compare(plan, say)
    except KeyboardInterrupt:
        say("interrupted: nothing was written")
        return ExitCode.INTERRUPTED
    if own.json is not None:
        Path(own.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print_comparison(printable_values(result), Console())
    if result["interrupted"]:
        say(f"interrupted: {len(result['jobs'])} of {len(plan.jobs)} jobs were measured")
        return ExitCode.INTERRUPTED
    generate_failed = any("error" in (job["generate"] or {}) for job in result["jobs"])
    return ExitCode.FAILED if generate_failed else ExitCode.OK


def _names(text: str) -> list[str]:
    return [name for name in (part.strip() for part in text.split(",")) if name]


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in _names(text)]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise UsageError(f"--batch-sizes: {text!r} is not a list of numbers such as 1,4,16")
    return sizes

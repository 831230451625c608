"""`pagedbatch bench`: `pagedbatch run` against Hugging Face's `generate` on this machine."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from pagedbatch.cli.flags import takes_options
from pagedbatch.cli.terminal import say
from pagedbatch.errors import UsageError
from pagedbatch.printable import printable_values
from pagedbatch.run.interrupts import EXIT_INTERRUPTED, Interrupts
from pagedbatch.settings import OPTIONS

#: Exit code where `generate` failed: our figures are there, the comparison is not.
_FAILED = 1
_OPTIONS = [OPTIONS[name] for name in ("device", "dtype", "attention", "forward", "kv_memory", "max_num_seqs")]
_job = partial(typer.Option, rich_help_panel="Job")
_generate = partial(typer.Option, rich_help_panel="Comparison with Hugging Face's generate")


@takes_options(_OPTIONS)
def bench(
    prompts: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPTS", rich_help_panel="Job", help="File of rows with prompts. (default: built-in ones)"
        ),
    ] = None,
    model: Annotated[
        str,
        _job(
            "--model", "-m", metavar="TEXT", help="Hub id or folder; with --dummy-weights, a config.json or its folder."
        ),
    ] = ...,  # type: ignore[assignment]
    dummy_weights: Annotated[
        bool, _job("--dummy-weights", help="Random weights, made from the config alone: to size a machine.")
    ] = False,
    dummy_length: Annotated[int, _job(min=1, metavar="N", help="Tokens per random prompt with --dummy-weights.")] = 256,
    jobs: Annotated[
        str, _job(metavar="NAMES", help="What to measure: one or several of greedy, sampling and beams.")
    ] = "greedy,sampling,beams",
    num_prompts: Annotated[int, _job(min=1, metavar="N", help="Maximum prompts per job.")] = 32,
    max_tokens: Annotated[
        int, _job(min=1, metavar="N", help="Tokens per output. End tokens are ignored, so that all have as many.")
    ] = 64,
    n: Annotated[int, _job("--n", "-n", min=2, metavar="N", help="Outputs per prompt in the sampling job.")] = 8,
    num_beams: Annotated[int, _job(min=2, metavar="N", help="Beams per prompt in the beams job.")] = 4,
    repeats: Annotated[int, _job(min=1, metavar="N", help="Runs of pagedbatch per job; the median counts.")] = 3,
    json_file: Annotated[Path | None, _job("--json", metavar="FILE", help="Write all figures to this file.")] = None,
    generate: Annotated[bool, _generate("--generate/--no-generate", help="Measure generate too.")] = True,
    batch_sizes: Annotated[
        str, _generate(metavar="SIZES", help="Batch sizes to try; the fastest one counts.")
    ] = "1,4,16,32",
    generate_seconds: Annotated[
        float, _generate(min=1, metavar="SECONDS", help="Time per job. It answers as many prompts as fit.")
    ] = 120,
    **flags: Any,
) -> int:
    """Measure this machine: output tokens per second here and with Hugging Face's generate, memory, time by part."""
    from rich.console import Console

    from pagedbatch.tools.bench.compare import BenchPlan, compare
    from pagedbatch.tools.bench.table import print_comparison
    from pagedbatch.tools.bench.workload import choose_jobs

    plan = BenchPlan(
        model=model,
        jobs=choose_jobs(_names(jobs), n=n, num_beams=num_beams, max_tokens=max_tokens),
        prompts=prompts,
        num_prompts=num_prompts,
        repeats=repeats,
        dummy_weights=dummy_weights,
        dummy_length=dummy_length,
        batch_sizes=_sizes(batch_sizes),
        generate_seconds=generate_seconds if generate else None,
        run_flags={each.name: each.default if flags[each.name] is None else flags[each.name] for each in _OPTIONS},
    )
    if json_file is not None and not json_file.parent.is_dir():
        raise UsageError(f"--json: there is no folder {json_file.parent}")
    try:
        with Interrupts():
            result = compare(plan, say)
    except KeyboardInterrupt:
        say("interrupted: nothing was written")
        return EXIT_INTERRUPTED
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print_comparison(printable_values(result), Console())
    if result["interrupted"]:
        say(f"interrupted: {len(result['jobs'])} of {len(plan.jobs)} jobs were measured")
        return EXIT_INTERRUPTED
    return _FAILED if any("error" in (job["generate"] or {}) for job in result["jobs"]) else 0


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

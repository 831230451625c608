"""`pagedbatch bench`: `pagedbatch run` against Hugging Face's `generate` on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from pagedbatch.cli.terminal import say
from pagedbatch.errors import UsageError
from pagedbatch.printable import printable_values
from pagedbatch.run.interrupts import EXIT_INTERRUPTED, Interrupts

#: Exit code where `generate` failed: our figures are there, the comparison is not.
_FAILED = 1
_ENGINE = "Engine, as in `run`"


def bench(
    prompts: Annotated[
        str | None,
        typer.Argument(metavar="[PROMPTS]", show_default=False, help="Rows with prompts. (default: built-in ones)"),
    ] = None,
    model: Annotated[
        str, typer.Option("--model", "-m", help="Hub id or folder; with --dummy-weights a config.json or its folder.")
    ] = ...,  # type: ignore[assignment]
    dummy_weights: Annotated[
        bool, typer.Option("--dummy-weights", help="Random weights, from the config alone: to size a machine.")
    ] = False,
    dummy_length: Annotated[int, typer.Option(min=1, help="Tokens of each random prompt with --dummy-weights.")] = 256,
    jobs: Annotated[str, typer.Option(help="Any of greedy, sampling, beams.")] = "greedy,sampling,beams",
    num_prompts: Annotated[int, typer.Option(min=1, help="Most prompts of each job.")] = 32,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each output; end tokens are ignored.")] = 64,
    n: Annotated[int, typer.Option("--n", "-n", min=2, help="Outputs a prompt of the sampling job.")] = 8,
    num_beams: Annotated[int, typer.Option(min=2, help="Width of the beams job.")] = 4,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of ours; the median counts.")] = 3,
    generate: Annotated[bool, typer.Option("--generate/--no-generate", help="Run Hugging Face's side too.")] = True,
    batch_sizes: Annotated[str, typer.Option(help="Batch sizes that generate may choose from.")] = "1,4,16,32",
    generate_seconds: Annotated[
        float, typer.Option(min=1, help="Time for generate in each job; it answers as many prompts as fit.")
    ] = 120,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.", rich_help_panel=_ENGINE)] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.", rich_help_panel=_ENGINE)] = "auto",
    attention: Annotated[str, typer.Option(help="auto, triton, cpu or torch.", rich_help_panel=_ENGINE)] = "auto",
    forward: Annotated[str, typer.Option(help="auto or plain.", rich_help_panel=_ENGINE)] = "auto",
    kv_memory: Annotated[str | None, typer.Option(help="Pool size: 4GiB.", rich_help_panel=_ENGINE)] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Most sequences at once.", rich_help_panel=_ENGINE)] = 128,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures here.")] = None,
) -> int:
    """Measure this box: output tokens a second here and with Hugging Face's generate, memory, and where time goes."""
    from rich.console import Console

    from pagedbatch.tools.bench.compare import BenchPlan, compare
    from pagedbatch.tools.bench.table import print_comparison
    from pagedbatch.tools.bench.workload import choose_jobs

    flags: dict[str, Any] = {
        "device": device,
        "dtype": dtype,
        "attention": attention,
        "forward": forward,
        "kv_memory": kv_memory,
        "max_num_seqs": max_num_seqs,
    }
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
        run_flags=flags,
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

"""Our side of a benchmark: `pagedbatch run` as a user would type it, and its own account. Knows no engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagedbatch.errors import RunError
from pagedbatch.output.stats_file import read_stats
from pagedbatch.tools.bench.processes import run_python
from pagedbatch.tools.bench.workload import BenchJob


def run_ours(job: BenchJob, prompts: Path, num_prompts: int, flags: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Runs one job once, reading, tokenising and writing included.

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

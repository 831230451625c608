"""The result of `compare` as terminal tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pagedbatch.wording import size

#: Memory that a run may take in addition to weights and pool.
_OVERHEAD_BYTES = 700 * 10**6
_PARTS = ("model", "attention", "sampling", "host", "io")


def print_comparison(result: Mapping[str, Any], console: Console) -> None:
    """What was run, both sides' speed and memory, and where our time went."""
    threads = f", {result['threads']} threads" if result["device"] == "cpu" else ""
    dummy = " (random weights)" if result["dummy_weights"] else ""
    console.print(Text(f"{result['model']}{dummy}, {result['dtype']} on {result['device']}{threads}", style="bold"))
    console.print(f"{result['prompts']} prompts, prefill included; output tokens per second (pagedbatch: median run)")
    for table in (_speed(result), _costs(result), _time(result)):
        console.print()
        console.print(table)
    console.print()
    console.print("every output has all its tokens, on both sides: end tokens are ignored")
    for line in (_margin(result), *_failures(result)):
        console.print(Text(line), soft_wrap=True)


def _margin(result: Mapping[str, Any]) -> str:
    """How far the peak of the largest job is below what a run may take."""
    peaks = [job["pagedbatch"]["peak_bytes"] for job in result["jobs"]]
    if None in peaks:
        return "this system does not tell peak memory"
    pool_bytes = result["jobs"][0]["pagedbatch"]["pool_bytes"]
    margin = result["weight_bytes"] + pool_bytes + _OVERHEAD_BYTES - max(peaks)
    goal = f"weights + pool ({size(pool_bytes)}) + {_OVERHEAD_BYTES // 10**6} MB"
    return f"peak memory is {size(abs(margin))} {'below' if margin >= 0 else 'ABOVE'} {goal}"


def _failures(result: Mapping[str, Any]) -> list[str]:
    return [job["generate"]["error"] for job in result["jobs"] if job["generate"] and "error" in job["generate"]]


def _generate(job: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The figures of `generate`, if there are any."""
    return None if job["generate"] is None or "error" in job["generate"] else job["generate"]


def _speed(result: Mapping[str, Any]) -> Table:
    table = _table("job", "outputs x tokens", "pagedbatch", "generate", "its batch", "ratio")
    for job in result["jobs"]:
        theirs = _generate(job)
        batch = ""
        if theirs is not None:
            part = "" if theirs["prompts"] == result["prompts"] else f", {theirs['prompts']} prompts"
            batch = f"{theirs['batch_size']}{part}"
        table.add_row(
            job["name"],
            _outputs(job),
            f"{job['pagedbatch']['tokens_per_second']:,.1f}",
            "" if theirs is None else f"{theirs['tokens_per_second']:,.1f}",
            batch,
            "" if job["ratio"] is None else f"{job['ratio']:.1f}x",
        )
    return table


def _costs(result: Mapping[str, Any]) -> Table:
    table = _table("job", "start-up", "peak MiB", "weights + KV used", "generate's peak")
    for job in result["jobs"]:
        ours, theirs = job["pagedbatch"], _generate(job)
        table.add_row(
            job["name"],
            f"{ours['startup_seconds']:.1f} s",
            _mebibytes(ours["peak_bytes"]),
            _mebibytes(result["weight_bytes"] + ours["pool_bytes_used"]),
            "" if theirs is None else _mebibytes(theirs["peak_bytes"]),
        )
    return table


def _time(result: Mapping[str, Any]) -> Table:
    """Where the time of the steps went."""
    table = _table("step's time", *_PARTS)
    for job in result["jobs"]:
        seconds = job["pagedbatch"]["time"]
        whole = sum(seconds[part] for part in _PARTS) or 1.0
        table.add_row(job["name"], *(f"{seconds[part] / whole:.0%}" for part in _PARTS))
    return table


def _outputs(job: Mapping[str, Any]) -> str:
    kind = f"{job['num_beams']} beams" if job["num_beams"] > 1 else f"n={job['n']}" if job["n"] > 1 else "1"
    return f"{kind} x {job['max_tokens']}"


def _mebibytes(count: int | None) -> str:
    return "unknown" if count is None else f"{count / 2**20:,.0f}"


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table

"""The workers or the shards of a run, a line each and one of all. Knows the keys of OUT.stats.json; knows no engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pagedbatch.wording import percent, plural

Stats = Mapping[str, Any]

_NAME_WIDTH = 20
_MEMORY_HEADS = ("Live", "Saved", "KV used")


def summary_lines(stats: Stats) -> list[tuple[str, str]]:
    """For the short report: how the rows were spread and, of workers, who died. Nothing where one engine did all."""
    if "workers" in stats:
        workers = stats["workers"]
        restarts, again = (sum(worker[name] for worker in workers) for name in ("restarts", "rows_again"))
        died = f"{restarts:,} restarted, {plural(again, 'row')} run again" if restarts else "none restarted"
        return [("workers", f"{_spread([worker['rows'] for worker in workers])}; {died}")]
    if "shards" in stats:
        return [("shards", _spread([shard["stats"]["rows"]["total"] for shard in stats["shards"]]))]
    return []


def _spread(rows: Sequence[int]) -> str:
    """`2: 56 to 64 rows each`."""
    if not rows:
        return "none started"
    least, most = min(rows), max(rows)
    return f"{len(rows):,}: {f'{least:,} to ' if least < most else ''}{plural(most, 'row')}{' each' * (len(rows) > 1)}"


def print_breakdown(stats: Stats, console: Console) -> None:
    """For the long report: the table, of a run that has any."""
    if stats.get("workers"):
        _print(_workers(stats), console)
    elif stats.get("shards"):
        _print(_shards(stats), console)


def _workers(stats: Stats) -> list[list[str]]:
    workers = stats["workers"]
    lines = [["Worker", "Machine", "Rows", "Died", "Again", *_MEMORY_HEADS, "Busy"]]
    for number, worker in enumerate(workers):
        counts = [f"{worker[name]:,}" for name in ("rows", "restarts", "rows_again")]
        lines.append([str(number), worker["node"], *counts, *_memory(worker["memory"]), _seconds(worker["time"])])
    totals = [f"{sum(worker[name] for worker in workers):,}" for name in ("rows", "restarts", "rows_again")]
    lines.append(["all", "", *totals, *_memory(stats["memory"]), _seconds(stats["time"])])
    if len({worker["node"] for worker in workers}) == 1:
        return [[line[0], *line[2:]] for line in lines]
    return lines


def _shards(stats: Stats) -> list[list[str]]:
    lines = [["Shard", "Rows", "Errors", "Tokens/s", *_MEMORY_HEADS, "Busy"]]
    named = [*((PurePath(shard["file"]).name, shard["stats"]) for shard in stats["shards"]), ("all", stats)]
    for name, shard in named:
        rows, speed = shard["rows"], shard["throughput"]["output_tokens_per_second"]
        counts = [f"{rows['total']:,}", f"{rows['error']:,}", f"{speed:,.0f}"]
        lines.append([name, *counts, *_memory(shard["memory"]), _seconds(shard["time"])])
    return lines


def _memory(memory: Stats | None) -> list[str]:
    """None: pools whose blocks differ in size have no account in common."""
    if memory is None:
        return [percent(None)] * len(_MEMORY_HEADS)
    live = memory["mean_live_blocks"] / memory["num_blocks"] if memory["num_blocks"] else None
    return [percent(live), percent(memory["sharing_saving"]), percent(memory["kv_used"])]


def _seconds(time: Mapping[str, float]) -> str:
    return f"{sum(time.values()):,.0f} s"


def _print(lines: Sequence[Sequence[str]], console: Console) -> None:
    """The first line is the head. Names are cut where they are long, numbers never."""
    head, *body = lines
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column(head[0], no_wrap=True, overflow="crop", max_width=_NAME_WIDTH)
    for name in head[1:]:
        table.add_column(name, no_wrap=True, justify="left" if name == "Machine" else "right")
    for line in body:
        table.add_row(*map(Text, line))
    console.print()
    console.print(table)

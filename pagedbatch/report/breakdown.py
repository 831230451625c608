"""The workers or the shards of a run: a line each, and one of all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pagedbatch.stats.schema import PoolMemory, Stats, Time
from pagedbatch.wording import percent, plural

_NAME_WIDTH = 20
_MEMORY_HEADS = ("Live", "Saved", "KV used")


def summary_lines(stats: Stats) -> list[tuple[str, str]]:
    """For the short report: how the rows were spread and which workers died. Nothing where one engine did all."""
    if stats.workers is not None:
        restarts = sum(worker.restarts for worker in stats.workers)
        again = sum(worker.rows_again for worker in stats.workers)
        died = f"{restarts:,} restarted, {plural(again, 'row')} run again" if restarts else "none restarted"
        return [("workers", f"{_spread([worker.rows for worker in stats.workers])}; {died}")]
    if stats.shards is not None:
        return [("shards", _spread([shard.stats.rows.total for shard in stats.shards]))]
    return []


def _spread(rows: Sequence[int]) -> str:
    """`2: 56 to 64 rows each`."""
    if not rows:
        return "none started"
    low, high = min(rows), max(rows)
    return f"{len(rows):,}: {f'{low:,} to ' if low < high else ''}{plural(high, 'row')}{' each' * (len(rows) > 1)}"


def print_breakdown(stats: Stats, console: Console) -> None:
    """For the long report: the table, of a run that has any."""
    if stats.workers:
        _print(_workers(stats), console)
    elif stats.shards:
        _print(_shards(stats), console)


def _workers(stats: Stats) -> list[list[str]]:
    workers = stats.workers or []
    lines = [["Worker", "Machine", "Rows", "Died", "Again", *_MEMORY_HEADS, "Busy"]]
    counts = [(worker.rows, worker.restarts, worker.rows_again) for worker in workers]
    for number, (worker, own) in enumerate(zip(workers, counts, strict=True)):
        cells = [f"{count:,}" for count in own]
        lines.append([str(number), worker.node, *cells, *_memory(worker.memory), _seconds(worker.time)])
    totals = [f"{sum(column):,}" for column in zip(*counts, strict=True)]
    lines.append(["all", "", *totals, *_memory(stats.memory), _seconds(stats.time)])
    if len({worker.node for worker in workers}) == 1:
        return [[line[0], *line[2:]] for line in lines]
    return lines


def _shards(stats: Stats) -> list[list[str]]:
    lines = [["Shard", "Rows", "Errors", "Tokens/s", *_MEMORY_HEADS, "Busy"]]
    named = [*((PurePath(shard.file).name, shard.stats) for shard in stats.shards or []), ("all", stats)]
    for name, shard in named:
        speed = shard.throughput.output_tokens_per_second
        counts = [f"{shard.rows.total:,}", f"{shard.rows.error:,}", f"{speed:,.0f}"]
        lines.append([name, *counts, *_memory(shard.memory), _seconds(shard.time)])
    return lines


def _memory(memory: PoolMemory | None) -> list[str]:
    """None: pools whose blocks differ in size have no memory in common."""
    if memory is None:
        return [percent(None)] * len(_MEMORY_HEADS)
    live = memory.mean_live_blocks / memory.num_blocks if memory.num_blocks else None
    return [percent(live), percent(memory.sharing_saving), percent(memory.kv_used)]


def _seconds(time: Time) -> str:
    return f"{time.total:,.0f} s"


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

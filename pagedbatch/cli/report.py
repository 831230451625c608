"""`pagedbatch report`: the account of finished runs, from their stats files."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pagedbatch.errors import UsageError
from pagedbatch.printable import printable, printable_values

if TYPE_CHECKING:
    from pagedbatch.stats.schema import Stats


def report(
    stats_files: Annotated[
        list[Path], typer.Argument(metavar="OUT.stats.json", help="Stats files, which runs write beside their output.")
    ],
    html: Annotated[
        Path | None, typer.Option(metavar="PAGE.html", help="Write a page with pictures of all the runs instead.")
    ] = None,
) -> None:
    """Show what runs did, how fast, and what their memory held."""
    runs = {path: open_stats(path) for path in stats_files}
    if html is not None:
        names = names_of(list(runs))
        write_page(html, {name: part for path in runs for name, part in _with_account(names[path], runs[path])})
        return
    from rich.console import Console
    from rich.text import Text

    from pagedbatch.report.details import details
    from pagedbatch.report.summary import summary

    console = Console()
    for path, stats in runs.items():
        if len(runs) > 1:
            console.print(Text(f"\n{printable(str(path))}", style="bold underline"), soft_wrap=True)
        shown = printable_values(stats)
        summary(shown, console)
        details(shown, console)


def names_of(paths: list[Path]) -> dict[Path, str]:
    """The name of each run on the page: its file's name without the ending, or the whole path if two share a name."""
    short = {path: path.name.removesuffix(".json").removesuffix(".stats") for path in paths}
    taken = Counter(short.values())
    return {path: name if taken[name] == 1 else str(path) for path, name in short.items()}


def _with_account(name: str, stats: Stats) -> list[tuple[str, Stats]]:
    """The run or, where blocks differ in size and its shards have no memory in common, each shard."""
    if stats.memory is None and stats.shards:
        return [(shard.file, shard.stats) for shard in stats.shards]
    return [(name, stats)]


def write_page(path: Path, runs: dict[str, Stats]) -> None:
    """Writes the page of `runs`, stats by name, to `path`.

    Raises:
        UsageError: matplotlib is not installed, or the file can't be written.
    """
    try:
        from pagedbatch.report.html.page import html_page
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise UsageError("--html needs matplotlib: pip install 'pagedbatch[report]'") from None
    page = html_page(printable_values(runs))
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"can't write {path}: {error.strerror}") from None


def open_stats(path: Path) -> Stats:
    """The contents of a stats file.

    Raises:
        UsageError: it can't be read, or is not the stats of a run.
    """
    from pagedbatch.output.stats_file import read_stats
    from pagedbatch.stats.record import RecordError

    try:
        return read_stats(path)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except RecordError as error:
        raise UsageError(f"{path}: not a stats file: {error}{_hint(path)}") from None


def _hint(path: Path) -> str:
    """Suggests the stats file if somebody named the output beside it."""
    beside = path.with_suffix(".stats.json")
    return f"; did you mean {beside}?" if beside != path and beside.is_file() else ""

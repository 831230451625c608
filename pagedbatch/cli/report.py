"""`pagedbatch report`: the account of finished runs, from their stats files."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from pagedbatch.errors import UsageError
from pagedbatch.printable import printable, printable_values
from pagedbatch.stats.schema import stats_problem


def report(
    stats_files: Annotated[
        list[Path], typer.Argument(metavar="OUT.stats.json", help="Stats files, which runs write beside their output.")
    ],
    html: Annotated[
        Path | None, typer.Option(metavar="PAGE.html", help="Write a page with pictures of all the runs instead.")
    ] = None,
) -> None:
    """Show what runs did, how fast, and what their memory held."""
    runs = {path: read_stats(path) for path in stats_files}
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


def _with_account(name: str, stats: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The run or, if its shards have no common account, each shard."""
    if _is_of_pools_apart(stats):
        return [(shard["file"], shard["stats"]) for shard in stats["shards"]]
    return [(name, stats)]


def write_page(path: Path, runs: dict[str, dict[str, Any]]) -> None:
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


def read_stats(path: Path) -> dict[str, Any]:
    """The contents of a stats file.

    Raises:
        UsageError: it can't be read, is not JSON, or is not the stats of a run.
    """
    try:
        stats = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise UsageError(f"{path}: not a stats file: no JSON{_hint(path)}") from None
    problem = stats_problem(stats)
    if problem is not None:
        raise UsageError(f"{path}: not a stats file: {problem}{_hint(path)}")
    return dict(stats)


def _is_of_pools_apart(stats: dict[str, Any]) -> bool:
    """Whether these are merged shards whose pools have no common account, because their blocks differ in size."""
    return stats["memory"] is None and bool(stats.get("shards"))


def _hint(path: Path) -> str:
    """Suggests the stats file if somebody named the output beside it."""
    beside = path.with_suffix(".stats.json")
    return f"; did you mean {beside}?" if beside != path and beside.is_file() else ""

"""`pagedbatch merge`: the outputs of all shards as the output of one run. Knows no file of rows."""

from __future__ import annotations

from typing import Annotated

import typer

from pagedbatch.cli.terminal import say

_PARTS_HELP = "The outputs of all shards, in any order, with their stats beside them."
_OUTPUT_HELP = "All records in input order, as JSONL; as Parquet if the name ends in .parquet; - for stdout."


def merge(
    parts: Annotated[list[str], typer.Argument(metavar="PART...", show_default=False, help=_PARTS_HELP)],
    output: Annotated[str, typer.Option("--output", "-o", show_default=False, help=_OUTPUT_HELP)],
) -> int:
    """Put the outputs of `run --shard I/N` together, as if one run had written them."""
    from pagedbatch.output.merge import merge_parts
    from pagedbatch.wording import plural

    merged = merge_parts(parts, output, say)
    counts = f"{merged.num_ok:,} ok, {plural(merged.num_error, 'error')}"
    rows = plural(merged.num_ok + merged.num_error, "row")
    say(f"merged    {plural(merged.num_parts, 'part')}, {rows}: {counts}")
    if merged.paths is not None:
        say(f"stats     {merged.paths.stats}")
        say(f"output    {merged.paths.output}")
    return merged.exit_code

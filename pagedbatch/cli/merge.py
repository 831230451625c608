"""`pagedbatch merge`: the outputs of all shards as the output of one run."""

from __future__ import annotations

from typing import Annotated

import typer

from pagedbatch.cli.terminal import say

_PARTS_HELP = "The outputs of all shards, in any order. Their stats files must lie beside them."
_OUTPUT_HELP = (
    "Where the records go, in input order: Parquet if the name ends in .parquet, else JSON Lines; - for stdout."
)


def merge(
    parts: Annotated[list[str], typer.Argument(metavar="PART", show_default=False, help=_PARTS_HELP)],
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help=_OUTPUT_HELP)],
) -> int:
    """Join the outputs of `run --shard I/N` into one, as if one run had written it."""
    from pagedbatch.output.merge import merge_outputs
    from pagedbatch.wording import plural

    merged = merge_outputs(parts, output)
    counts = f"{merged.num_ok:,} ok, {plural(merged.num_error, 'error')}"
    rows = plural(merged.num_ok + merged.num_error, "row")
    say(f"merged    {plural(merged.num_outputs, 'shard output')}, {rows}: {counts}")
    if merged.paths is not None:
        say(f"stats     {merged.paths.stats}")
        say(f"output    {merged.paths.output}")
    return merged.exit_code

"""The shard outputs that `pagedbatch merge` takes: which rows each holds, and whether they make one whole run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedbatch.errors import UsageError
from pagedbatch.output.journal_entry import unseal
from pagedbatch.output.manifest import Manifest, read_manifest, run_differences
from pagedbatch.output.paths import OutputPaths, output_paths
from pagedbatch.output.stats_file import read_stats
from pagedbatch.shard import Shard, name_rows
from pagedbatch.stats.record import RecordError
from pagedbatch.stats.schema import ShardInfo, ShardInput, Stats
from pagedbatch.wording import plural

_MAX_MANIFEST_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class ShardOutput:
    """The finished output of one shard: its name as given, the stats beside it, and the shard they describe."""

    name: str
    path: Path
    stats: Stats
    shard: ShardInfo

    @property
    def rows(self) -> range:
        return self.shard.rows


def open_shard_outputs(names: Sequence[str]) -> list[ShardOutput]:
    """The outputs in row order. Together they hold every row of one input exactly once.

    Raises:
        UsageError: one can't be merged, they are not of one run, or rows are missing or in two of them.
    """
    outputs = sorted(map(_open_shard_output, names), key=lambda output: (output.rows.start, output.rows.stop))
    seen: set[Path] = set()
    for output in outputs:
        if output.path in seen:
            raise UsageError(f"{output.name} is given twice")
        seen.add(output.path)
    _check_same_run(outputs)
    _check_cover(outputs)
    return outputs


def merged_paths(output: str, outputs: Sequence[ShardOutput]) -> OutputPaths | None:
    """The files of the merged output; None for stdout.

    Raises:
        UsageError: nothing can be written there, or it would overwrite a shard's output or stats.
    """
    paths = None
    for shard in outputs:
        for own in (shard.path, OutputPaths.of(shard.path).stats):
            paths = output_paths(output, str(own))
    return paths


def _open_shard_output(name: str) -> ShardOutput:
    if name == "-":
        raise UsageError("a shard output must be a file: merge reads the stats file beside it")
    path = Path(name).resolve()
    if path.is_dir():
        raise UsageError(f"{name} is a folder: name the shard outputs in it")
    files = OutputPaths.of(path)
    if files.is_parquet:
        raise UsageError(f"{name} is Parquet: shard outputs must be .jsonl; the merged --output may be .parquet")
    if files.journal.exists():
        raise UsageError(f"{name} is unfinished: {_how_to_finish(name, files.journal)}")
    if not path.is_file():
        raise UsageError(f"{name}: no such file")
    stats, shard = _read_stats(name, files.stats)
    if stats.rows.ok + stats.rows.error != shard.num_rows:
        raise UsageError(f"{name} is unfinished by its stats: run its command again")
    return ShardOutput(name, path, stats, shard)


def _how_to_finish(name: str, journal: Path) -> str:
    """The command, as far as the journal tells it."""
    entry = None
    with suppress(OSError), journal.open("rb") as file:
        entry = unseal(file.readline(_MAX_MANIFEST_BYTES))
    stored = read_manifest(entry)
    if stored is None:
        return f"{journal} is left: run its command again"
    words = [stored.input.name, "--model", stored.model.name]
    shard = stored.settings.get("shard")
    if isinstance(shard, str):
        words += ["--shard", shard]
    command = shlex.join(["pagedbatch", "run", *words, "--output", name])
    return f"run `{command}` again, with the other options that it had"


def _read_stats(name: str, path: Path) -> tuple[Stats, ShardInfo]:
    """The stats of a shard output, and what they say of its shard."""
    try:
        stats = read_stats(path)
    except OSError as error:
        raise UsageError(f"{name}: its stats, {path}, can't be read: {error.strerror}") from None
    except RecordError as error:
        raise UsageError(f"{name}: {path} is not a stats file: {error}") from None
    if stats.shard is None:
        raise UsageError(f"{name} is not a shard output: {path} is of a run without --shard")
    return stats, stats.shard


def _check_same_run(outputs: Sequence[ShardOutput]) -> None:
    """Refuses outputs whose rows don't belong together: names may differ, contents and settings may not."""
    first = outputs[0]
    for other in outputs[1:]:
        found = _differences(first.shard, other.shard)
        if found:
            raise UsageError(f"{first.name} and {other.name} are not of one run: {'; '.join(found)}")


def _differences(one: ShardInfo, other: ShardInfo) -> list[str]:
    found = []
    if (one.input.size, one.input.hash) != (other.input.size, other.input.hash):
        names = one.input.name, other.input.name
        found.append(
            f"input: {names[0]!r} and {names[1]!r}" if names[0] != names[1] else "input: its content has changed"
        )
    elif one.of_rows != other.of_rows:
        found.append(f"rows in all: {one.of_rows} and {other.of_rows}")
    return found + run_differences((one.model, other.model), (one.settings, other.settings), "{} and {}")


def _check_cover(outputs: Sequence[ShardOutput]) -> None:
    """Refuses gaps and overlaps, all of them in one line."""
    problems = []
    num_rows = outputs[0].shard.of_rows
    reached, furthest = 0, outputs[0]
    for output in outputs:
        rows = output.rows
        if rows.start > reached:
            problems.append(_gap(range(reached, rows.start), outputs))
        twice = range(rows.start, min(rows.stop, reached))
        if twice:
            problems.append(f"rows {name_rows(twice)} are in {furthest.name} and in {output.name}")
        if rows.stop > reached:
            reached, furthest = rows.stop, output
    if reached < num_rows:
        problems.append(_gap(range(reached, num_rows), outputs))
    if problems:
        raise UsageError(f"the shard outputs are not the whole of {plural(num_rows, 'row')}: {'; '.join(problems)}")


def _gap(missing: range, outputs: Sequence[ShardOutput]) -> str:
    """The missing rows, and the shards that hold them if all outputs have the same number of shards."""
    counts = {Shard.parse(output.shard.shard).count for output in outputs}
    shards = ""
    if len(counts) == 1:
        count, num_rows = counts.pop(), outputs[0].shard.of_rows
        first, last = (str(Shard.of_row(row, num_rows, count)) for row in (missing[0], missing[-1]))
        shards = f" (--shard {first})" if first == last else f" (--shard {first} to {last})"
    return f"rows {name_rows(missing)} are in none{shards}"


def describe_shard(manifest: Manifest, rows: range, num_rows: int, other_settings: Mapping[str, Any]) -> ShardInfo:
    """The section `shard` of the stats: which rows these are, and what the results depend on apart from the shard."""
    content = manifest.input
    settings = {name: value for name, value in manifest.stored().settings.items() if name not in ("shard", "rows")}
    return ShardInfo(
        shard=manifest.settings["shard"],
        first_row=rows.start,
        num_rows=len(rows),
        of_rows=num_rows,
        input=ShardInput(name=content.name, size=content.size, hash=content.digest()),
        model=manifest.model,
        settings={**settings, **other_settings},
    )

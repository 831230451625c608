"""The outputs of shards, as `pagedbatch merge` takes them: what each is of, and whether together they are the whole.

Knows stats files and journals; reads no records.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedbatch.errors import UsageError
from pagedbatch.output.journal_lines import Manifest, read_manifest, unseal
from pagedbatch.output.paths import OutputPaths, output_paths
from pagedbatch.output.stats_file import read_stats
from pagedbatch.shard import Shard, name_rows
from pagedbatch.stats.record import RecordError
from pagedbatch.stats.schema import ShardInfo, ShardInput, ShardModel, Stats
from pagedbatch.wording import plural

_MAX_MANIFEST_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Part:
    """The finished output of one shard: its name as given, the stats beside it, and the shard that these describe."""

    name: str
    path: Path
    stats: Stats
    shard: ShardInfo

    @property
    def rows(self) -> range:
        return self.shard.rows


def open_parts(names: Sequence[str]) -> list[Part]:
    """The parts in the order of their rows, which together are every row of one input, each once.

    Raises:
        UsageError: one can't be merged, they are not of one run, or rows are missing or stand in two.
    """
    parts = sorted(map(_open_part, names), key=lambda part: (part.rows.start, part.rows.stop))
    seen: set[Path] = set()
    for part in parts:
        if part.path in seen:
            raise UsageError(f"{part.name} is given twice")
        seen.add(part.path)
    _check_same_run(parts)
    _check_cover(parts)
    return parts


def merged_paths(output: str, parts: Sequence[Part]) -> OutputPaths | None:
    """The files of the merged output; None for stdout.

    Raises:
        UsageError: nothing can be written there, or it would overwrite a part or a part's stats.
    """
    paths = None
    for part in parts:
        for own in (part.path, OutputPaths.of(part.path).stats):
            paths = output_paths(output, str(own))
    return paths


def _open_part(name: str) -> Part:
    if name == "-":
        raise UsageError("a part must be a file: merge reads the stats that stand beside it")
    path = Path(name).resolve()
    if path.is_dir():
        raise UsageError(f"{name} is a folder: name the parts in it")
    files = OutputPaths.of(path)
    if files.is_parquet:
        raise UsageError(f"{name} is Parquet: parts must be .jsonl; the merged --output may be .parquet")
    if files.journal.exists():
        raise UsageError(f"{name} is unfinished: {_how_to_finish(name, files.journal)}")
    if not path.is_file():
        raise UsageError(f"{name}: no such file")
    stats, shard = _read_stats(name, files.stats)
    if stats.rows.ok + stats.rows.error != shard.num_rows:
        raise UsageError(f"{name} is unfinished by its stats: run its command again")
    return Part(name, path, stats, shard)


def _how_to_finish(name: str, journal: Path) -> str:
    """The command, as far as the journal tells it."""
    entry = None
    with suppress(OSError), journal.open("rb") as file:
        entry = unseal(file.readline(_MAX_MANIFEST_BYTES))
    stored = None if entry is None else read_manifest(entry.record)
    if stored is None:
        return f"{journal} stands: run its command again"
    words = [stored["input"]["name"], "--model", stored["model"]["name"]]
    shard = stored["settings"].get("shard")
    if isinstance(shard, str):
        words += ["--shard", shard]
    command = shlex.join(["pagedbatch", "run", *words, "--output", name])
    return f"run `{command}` again, with the other options that it had"


def _read_stats(name: str, path: Path) -> tuple[Stats, ShardInfo]:
    """The stats of a part, and what they say of its shard."""
    try:
        stats = read_stats(path)
    except OSError as error:
        raise UsageError(f"{name}: its stats, {path}, can't be read: {error.strerror}") from None
    except RecordError as error:
        raise UsageError(f"{name}: {path} is not a stats file: {error}") from None
    if stats.shard is None:
        raise UsageError(f"{name} is no part: {path} is of a run without --shard")
    return stats, stats.shard


def _check_same_run(parts: Sequence[Part]) -> None:
    """Refuses parts whose results don't belong together: names may differ, contents and settings may not."""
    first = parts[0]
    for other in parts[1:]:
        found = list(_differences(first.shard, other.shard))
        if found:
            raise UsageError(f"{first.name} and {other.name} are not of one run: {'; '.join(found)}")


def _differences(one: ShardInfo, other: ShardInfo) -> Iterator[str]:
    if (one.input.size, one.input.hash) != (other.input.size, other.input.hash):
        names = one.input.name, other.input.name
        yield f"input: {names[0]!r} and {names[1]!r}" if names[0] != names[1] else "input: its content has changed"
    elif one.of_rows != other.of_rows:
        yield f"rows in all: {one.of_rows} and {other.of_rows}"
    if one.model.fingerprint != other.model.fingerprint:
        names = one.model.name, other.model.name
        yield f"model: {names[0]!r} and {names[1]!r}" if names[0] != names[1] else "model: its files have changed"
    for name in dict.fromkeys([*one.settings, *other.settings]):
        values = one.settings.get(name), other.settings.get(name)
        if values[0] != values[1]:
            yield f"{name}: {values[0]!r} and {values[1]!r}"


def _check_cover(parts: Sequence[Part]) -> None:
    """Refuses gaps and overlaps, all of them in one line."""
    problems = []
    num_rows = parts[0].shard.of_rows
    reached, furthest = 0, parts[0]
    for part in parts:
        rows = part.rows
        if rows.start > reached:
            problems.append(_gap(range(reached, rows.start), parts))
        twice = range(rows.start, min(rows.stop, reached))
        if twice:
            problems.append(f"rows {name_rows(twice)} are in {furthest.name} and in {part.name}")
        if rows.stop > reached:
            reached, furthest = rows.stop, part
    if reached < num_rows:
        problems.append(_gap(range(reached, num_rows), parts))
    if problems:
        raise UsageError(f"the parts are not the whole of {plural(num_rows, 'row')}: {'; '.join(problems)}")


def _gap(missing: range, parts: Sequence[Part]) -> str:
    """Names the rows, and the shards that hold them where all parts were cut into equally many."""
    counts = {Shard.parse(part.shard.shard).count for part in parts}
    shards = ""
    if len(counts) == 1:
        count, num_rows = counts.pop(), parts[0].shard.of_rows
        first, last = (str(Shard.of_row(row, num_rows, count)) for row in (missing[0], missing[-1]))
        shards = f" (--shard {first})" if first == last else f" (--shard {first} to {last})"
    return f"rows {name_rows(missing)} are in none{shards}"


def describe_shard(manifest: Manifest, rows: range, num_rows: int, other_settings: Mapping[str, Any]) -> ShardInfo:
    """The section `shard` of the stats: which rows these are, and what the results depend on, shards apart."""
    content = manifest.input
    stored = manifest.stored()
    settings = {name: value for name, value in stored["settings"].items() if name not in ("shard", "rows")}
    return ShardInfo(
        shard=manifest.settings["shard"],
        first_row=rows.start,
        num_rows=len(rows),
        of_rows=num_rows,
        input=ShardInput(name=content.name, size=content.size, hash=content.digest()),
        model=ShardModel(name=stored["model"]["name"], fingerprint=stored["model"]["fingerprint"]),
        settings={**settings, **other_settings},
    )

"""The outputs of shards, as `pagedbatch merge` takes them: what each is of, and whether together they are the whole.

Knows stats files and journals; reads no records.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedbatch.errors import UsageError
from pagedbatch.output.journal_lines import Manifest, read_manifest, unseal
from pagedbatch.output.paths import OutputPaths, output_paths
from pagedbatch.shard import Shard, name_rows
from pagedbatch.stats.schema import part_problem
from pagedbatch.wording import plural

_MAX_MANIFEST_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Part:
    """The finished output of one shard. `name` is what the user called it, `stats` what stands beside it."""

    name: str
    path: Path
    stats: Mapping[str, Any]

    @property
    def identity(self) -> Mapping[str, Any]:
        identity: Mapping[str, Any] = self.stats["shard"]
        return identity

    @property
    def rows(self) -> range:
        first: int = self.identity["first_row"]
        return range(first, first + self.identity["num_rows"])


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
    stats = _read_stats(name, files.stats)
    rows = stats["rows"]
    if rows["ok"] + rows["error"] != stats["shard"]["num_rows"]:
        raise UsageError(f"{name} is unfinished by its stats: run its command again")
    return Part(name, path, stats)


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


def _read_stats(name: str, path: Path) -> dict[str, Any]:
    try:
        stats = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{name}: its stats, {path}, can't be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise UsageError(f"{name}: {path} is not a stats file: no JSON") from None
    if isinstance(stats, dict) and "rows" in stats and "shard" not in stats:
        raise UsageError(f"{name} is no part: {path} is of a run without --shard")
    problem = part_problem(stats)
    if problem is not None:
        raise UsageError(f"{name}: {path} is not a stats file: {problem}")
    return dict(stats)


def _check_same_run(parts: Sequence[Part]) -> None:
    """Refuses parts whose results don't belong together: names may differ, contents and settings may not."""
    first = parts[0]
    for other in parts[1:]:
        found = list(_differences(first.identity, other.identity))
        if found:
            raise UsageError(f"{first.name} and {other.name} are not of one run: {'; '.join(found)}")


def _differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    inputs = one["input"], other["input"]
    if any(inputs[0][key] != inputs[1][key] for key in ("size", "hash")):
        names = [content["name"] for content in inputs]
        yield f"input: {names[0]!r} and {names[1]!r}" if names[0] != names[1] else "input: its content has changed"
    elif one["of_rows"] != other["of_rows"]:
        yield f"rows in all: {one['of_rows']} and {other['of_rows']}"
    models = one["model"], other["model"]
    if models[0]["fingerprint"] != models[1]["fingerprint"]:
        names = [model["name"] for model in models]
        yield f"model: {names[0]!r} and {names[1]!r}" if names[0] != names[1] else "model: its files have changed"
    for name in dict.fromkeys([*one["settings"], *other["settings"]]):
        values = one["settings"].get(name), other["settings"].get(name)
        if values[0] != values[1]:
            yield f"{name}: {values[0]!r} and {values[1]!r}"


def _check_cover(parts: Sequence[Part]) -> None:
    """Refuses gaps and overlaps, all of them in one line."""
    problems = []
    num_rows = parts[0].identity["of_rows"]
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
    counts = {Shard.parse(part.identity["shard"]).count for part in parts}
    shards = ""
    if len(counts) == 1:
        count, num_rows = counts.pop(), parts[0].identity["of_rows"]
        first, last = (str(Shard.of_row(row, num_rows, count)) for row in (missing[0], missing[-1]))
        shards = f" (--shard {first})" if first == last else f" (--shard {first} to {last})"
    return f"rows {name_rows(missing)} are in none{shards}"


def describe_shard(manifest: Manifest, rows: range, num_rows: int) -> dict[str, Any]:
    """The section `shard` of the stats: which rows these are, and what the results depend on, shards apart."""
    content = manifest.input
    stored = manifest.stored()
    settings = {name: value for name, value in stored["settings"].items() if name not in ("shard", "rows")}
    return {
        "shard": manifest.settings["shard"],
        "first_row": rows.start,
        "num_rows": len(rows),
        "of_rows": num_rows,
        "input": {"name": content.name, "size": content.size, "hash": content.digest()},
        "model": stored["model"],
        "settings": settings,
    }

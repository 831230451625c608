"""The outputs of all shards become the output of the whole run, a record in memory at a time. Knows no engine.

The parts are checked record by record while they are copied: what is not whole replaces nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from pagedbatch.errors import ExitCode, RunError, UsageError
from pagedbatch.output.locking import open_locked
from pagedbatch.output.openai_records import answered_row
from pagedbatch.output.paths import OutputPaths
from pagedbatch.output.shard_outputs import Part, merged_paths, open_parts
from pagedbatch.output.stats_file import write_stats
from pagedbatch.output.write import clear_leftovers, write_records
from pagedbatch.stats.merge import merge_shards
from pagedbatch.wording import plural


@dataclass(frozen=True, slots=True)
class Merged:
    """What was merged. `paths` is None where the output went to stdout."""

    num_parts: int
    num_ok: int
    num_error: int
    paths: OutputPaths | None

    @property
    def exit_code(self) -> int:
        return ExitCode.ROW_ERRORS if self.num_error else ExitCode.OK


def merge_parts(names: Sequence[str], output: str, notice: Callable[[str], None]) -> Merged:
    """Writes the records of the parts in input order to `output`, and the account of all beside it.

    Raises:
        UsageError: the parts are not the whole of one run, or nothing can be written there; nothing was.
        RunError: a part is damaged, or the disk fails; the output is as it was, or new and its stats are not.
    """
    parts = open_parts(names)
    paths = merged_paths(output, parts)
    if any(part.stats.versions != parts[0].stats.versions for part in parts):
        notice("the parts were written by different versions: see versions in their stats")
    with _sole_writer(paths):
        clear_leftovers(paths)
        to_parquet = paths is not None and paths.is_parquet
        write_records(paths, (record for part in parts for record in _records(part, to_parquet)))
        stats = merge_shards({part.name: part.stats for part in parts}, output)
        # After the records, so that no stats speak of an output that turned out to be damaged.
        if paths is not None:
            write_stats(paths.stats, stats)
    return Merged(len(parts), stats.rows.ok, stats.rows.error, paths)


@contextmanager
def _sole_writer(paths: OutputPaths | None) -> Iterator[None]:
    """Holds the output's lock, that of its journal, so that no run and no other merge writes there meanwhile."""
    if paths is None:
        yield
        return
    descriptor = open_locked(paths.journal)
    try:
        if os.fstat(descriptor).st_size:
            raise UsageError(f"{paths.journal} stands: finish its run, or choose another --output")
        try:
            yield
        finally:
            with suppress(OSError):  # an empty one is in nobody's way
                paths.journal.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def _records(part: Part, to_parquet: bool) -> Iterator[bytes]:
    """The records of a part.

    Raises:
        RunError: they are not those that its stats speak of.
    """
    expected = iter(part.rows)
    num_error = number = 0
    try:
        with part.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                place = f"{part.name}, line {number}"
                found = _row_of(line, place, to_parquet)
                row = next(expected, None)
                if row != found.row:
                    should = "nothing should follow" if row is None else f"row {row} should stand"
                    raise RunError(f"{place}: row {found.row} stands where {should}")
                num_error += not found.ok
                yield line[:-1]
    except OSError as error:
        raise RunError(f"can't read {part.name}: {error.strerror}") from error
    if number < len(part.rows):
        raise RunError(f"{part.name} ends after {number} of its {plural(len(part.rows), 'row')}")
    if num_error != part.stats.rows.error:
        errors = plural(num_error, "error row")
        raise RunError(f"{part.name} holds {errors}, its stats speak of {part.stats.rows.error}")


@dataclass(frozen=True, slots=True)
class _Found:
    row: Any
    ok: bool


def _row_of(line: bytes, place: str, to_parquet: bool) -> _Found:
    """Which row a record is of, in our shape or in OpenAI's."""
    record: Any = None
    with suppress(ValueError):
        record = json.loads(line)
    if isinstance(record, dict) and line.endswith(b"\n"):
        if "index" in record and "status" in record:
            return _Found(record["index"], record["status"] == "ok")
        answered = answered_row(record)
        if answered is not None:
            if to_parquet:
                raise RunError(f"{place}: an answer in OpenAI's shape, for which Parquet has no columns: write .jsonl")
            return _Found(answered, record["error"] is None)
    raise RunError(f"{place}: cut or damaged: no record")

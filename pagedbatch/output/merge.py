"""Merges the outputs of all shards into the output of the whole run, one record in memory at a time.

Records are checked while they are copied: a damaged shard output replaces nothing.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from pagedbatch.errors import ExitCode, RunError, UsageError
from pagedbatch.output.durable import open_locked
from pagedbatch.output.openai_records import row_of_openai_record
from pagedbatch.output.paths import OutputPaths
from pagedbatch.output.shard_outputs import ShardOutput, merged_paths, open_shard_outputs
from pagedbatch.output.stats_file import write_stats
from pagedbatch.output.write import clear_leftovers, write_records
from pagedbatch.stats.merge import merge_shards
from pagedbatch.wording import plural

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Merged:
    """What was merged. `paths` is None where the output went to stdout."""

    num_outputs: int
    num_ok: int
    num_error: int
    paths: OutputPaths | None

    @property
    def exit_code(self) -> int:
        return ExitCode.ROW_ERRORS if self.num_error else ExitCode.OK


def merge_outputs(names: Sequence[str], output: str) -> Merged:
    """Writes the records of all shards in input order to `output`, and their merged stats beside it.

    Raises:
        UsageError: the shard outputs are not the whole of one run, or nothing can be written there; nothing was.
        RunError: a shard output is damaged, or the disk fails; the output is unchanged, or new without new stats.
    """
    shards = open_shard_outputs(names)
    paths = merged_paths(output, shards)
    if any(shard.stats.versions != shards[0].stats.versions for shard in shards):
        _log.warning("the shard outputs were written by different versions: see versions in their stats")
    with _sole_writer(paths):
        clear_leftovers(paths)
        to_parquet = paths is not None and paths.is_parquet
        write_records(paths, (record for shard in shards for record in _records(shard, to_parquet)))
        stats = merge_shards({shard.name: shard.stats for shard in shards}, output)
        # After the records, so that no stats speak of an output that turned out to be damaged.
        if paths is not None:
            write_stats(paths.stats, stats)
    return Merged(len(shards), stats.rows.ok, stats.rows.error, paths)


@contextmanager
def _sole_writer(paths: OutputPaths | None) -> Iterator[None]:
    """Holds the lock of the output's journal, so that no run and no other merge writes there meanwhile."""
    if paths is None:
        yield
        return
    descriptor = open_locked(paths.journal)
    try:
        if os.fstat(descriptor).st_size:
            raise UsageError(f"{paths.journal} is of an unfinished run: finish it, or choose another --output")
        try:
            yield
        finally:
            with suppress(OSError):  # an empty one is in nobody's way
                paths.journal.unlink()
    finally:
        os.close(descriptor)


def _records(shard: ShardOutput, to_parquet: bool) -> Iterator[bytes]:
    """The records of a shard.

    Raises:
        RunError: they are not those that its stats speak of.
    """
    rows = iter(shard.rows)
    num_error = number = 0
    try:
        with shard.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                place = f"{shard.name}, line {number}"
                found = _row_of(line, place, to_parquet)
                row = next(rows, None)
                if row != found.row:
                    expected = "no more rows" if row is None else f"row {row}"
                    raise RunError(f"{place}: found row {found.row}, expected {expected}")
                num_error += not found.ok
                yield line[:-1]
    except OSError as error:
        raise RunError(f"can't read {shard.name}: {error.strerror}") from error
    if number < len(shard.rows):
        raise RunError(f"{shard.name} ends after {number} of its {plural(len(shard.rows), 'row')}")
    if num_error != shard.stats.rows.error:
        errors = plural(num_error, "error row")
        raise RunError(f"{shard.name} holds {errors}, its stats speak of {shard.stats.rows.error}")


@dataclass(frozen=True, slots=True)
class _Found:
    row: Any
    ok: bool


def _row_of(line: bytes, place: str, to_parquet: bool) -> _Found:
    """Which row a record is of, in our format or in OpenAI's."""
    record: Any = None
    with suppress(ValueError):
        record = json.loads(line)
    if isinstance(record, dict) and line.endswith(b"\n"):
        if "index" in record and "status" in record:
            return _Found(record["index"], record["status"] == "ok")
        row = row_of_openai_record(record)
        if row is not None:
            if to_parquet:
                raise RunError(f"{place}: a record in OpenAI's format, for which Parquet has no columns: write .jsonl")
            return _Found(row, record["error"] is None)
    raise RunError(f"{place}: cut or damaged: no record")

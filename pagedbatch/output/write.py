"""The end of a run: the records of a complete journal become the output. Knows no model and no engine.

Everything here can be done again: until the output stands whole under its name, the journal is there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress

from pagedbatch.errors import RunError
from pagedbatch.output.durable import temporary_name, write_atomically
from pagedbatch.output.journal import Journal
from pagedbatch.output.parquet import write_parquet
from pagedbatch.output.paths import OutputPaths
from pagedbatch.output.stats_file import read_stats
from pagedbatch.stats.record import RecordError
from pagedbatch.stats.schema import Stats


def clear_leftovers(paths: OutputPaths | None) -> None:
    """Removes what a run that was killed while it wrote left half done. To be called with the journal locked."""
    if paths is not None:
        for path in (paths.output, paths.stats):
            with suppress(OSError):
                temporary_name(path).unlink(missing_ok=True)


def write_records(paths: OutputPaths | None, records: Iterator[bytes]) -> None:
    """Writes the output, whole or not at all; None is stdout.

    Raises:
        RunError: it can't be written.
    """
    if paths is None:
        _write_to_stdout(records)
    elif paths.is_parquet:
        write_parquet(paths.output, records)
    else:
        write_atomically(paths.output, _lines(records))


def write_output(paths: OutputPaths | None, journal: Journal, *, keep_journal: bool) -> None:
    """Writes every record in input order, then ends the journal, or marks and keeps it for rows still to be run.

    Raises:
        RunError: the output can't be written; the journal is as it was.
    """
    write_records(paths, journal.records())
    if keep_journal and paths is not None:
        journal.mark_finished()
    else:
        journal.remove()


def stats_of_finished(paths: OutputPaths, journal: Journal) -> Stats | None:
    """The stats that an earlier run left, if they are those of the run which finished the journal."""
    try:
        stats = read_stats(paths.stats)
    except (OSError, RecordError):
        return None
    counts = (stats.rows.ok, stats.rows.error)
    return stats if counts == (journal.num_ok, journal.num_error) else None


def _lines(records: Iterator[bytes]) -> Iterator[bytes]:
    return (record + b"\n" for record in records)


def _write_to_stdout(records: Iterator[bytes]) -> None:
    try:
        sys.stdout.buffer.writelines(_lines(records))
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise RunError(f"can't write the output to stdout: {error.strerror}") from error

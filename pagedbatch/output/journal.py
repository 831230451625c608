"""OUT.jsonl.journal: the rows finished so far, safe against a kill at any moment.

The first line is the manifest: what the results depend on. Each further line is a finished record, in completion order,
with one key added at the end of its JSON object:

    {"id": "a", ..., "error": null, "journal": {"row": 0, "ok": true, "crc32": "89abcdef"}}

The checksum covers the record, the row number and `ok`. Of two lines for one row the later one counts, so that a row
can be run again. When the input has grown, a new manifest is added among the records (with row -1). When the output is
written, a mark is added at the end (with row -2). If error rows are left, or rows past a limit, the finished journal is
kept as OUT.jsonl.finished, for a later run to go on from.

Cut or damaged lines at the end were being written when the run was killed: they are cut off, and their rows run again.
A damaged line with whole lines behind it has another cause, such as the disk: the journal is refused. The journal is
locked while it is open, so that two runs can't share an output.
"""

from __future__ import annotations

import os
import shlex
import tempfile
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Self

from pagedbatch.errors import RunError, UsageError
from pagedbatch.output.durable import open_locked, sync_folder, write_at
from pagedbatch.output.journal_entry import FINISHED_ROW, MANIFEST_ROW, Entry, seal, unseal
from pagedbatch.output.manifest import BEGINNING, Manifest, StoredManifest, read_manifest
from pagedbatch.output.paths import finished_name
from pagedbatch.wording import plural

#: A power cut loses at most the rows of this time, or this many rows: after that they are synced to the disk.
_SYNC_SECONDS = 1.0
_SYNC_ROWS = 10_000
_READ_BYTES = 1 << 12
_ADVICE = "pass --restart to start over, or choose another --output"
_NOT_FINISHED, _OK, _ERROR = range(3)


class Journal:
    """An open, locked journal of `num_rows` rows from `first_row` on.

    `num_ok` and `num_error` count the finished rows, `num_resumed` those that were finished when it was opened. Takes
    nine bytes of memory per row.
    """

    def __init__(self, descriptor: int, path: Path | None, num_rows: int, first_row: int = 0) -> None:
        self._descriptor = descriptor
        self._path = path
        self._end = 0
        self._first_row = first_row
        self._offsets = array("q", bytes(8 * num_rows))
        self._states = bytearray(num_rows)
        self._num_unsynced = 0
        self._synced_at = time.monotonic()
        self._syncer = ThreadPoolExecutor(1, "journal-sync")
        self._syncing: Future[None] | None = None
        self._is_new = False
        self._is_finished = False
        self.num_ok = 0
        self.num_error = 0
        self.num_resumed = 0
        self.num_retried = 0
        self.stored_versions: Mapping[str, str] = {}

    @classmethod
    def open(
        cls,
        path: Path,
        manifest: Manifest,
        *,
        num_rows: int,
        first_row: int = 0,
        restart: bool = False,
        retry_errors: bool = False,
    ) -> Journal:
        """Opens the journal at `path` and resumes what a run with the same manifest left there.

        Rows outside `first_row` to `first_row + num_rows` stay in the journal and are otherwise ignored.
        `retry_errors` counts error rows as not finished. `restart` drops everything first.

        Raises:
            UsageError: another run has it open, it can't be written, it is damaged, or it belongs to another run.
        """
        if finished_name(path).exists() and not path.exists():
            with suppress(OSError):  # another run has just renamed it
                finished_name(path).replace(path)
        journal = cls(open_locked(path), path, num_rows, first_row)
        try:
            if restart:
                os.ftruncate(journal._descriptor, 0)
            journal._resume(manifest, retry_errors)
            sync_folder(path.parent)
        except BaseException as error:
            journal.close()
            if isinstance(error, OSError):
                raise UsageError(f"can't write {path}: {error.strerror}") from error
            raise
        return journal

    @classmethod
    def temporary(cls, manifest: Manifest, *, num_rows: int) -> Journal:
        """A journal in a temporary file, for a run that writes to stdout and can't be resumed.

        Raises:
            UsageError: the file can't be written.
        """
        try:
            with tempfile.TemporaryFile(prefix="pagedbatch-journal-") as file:
                journal = cls(os.dup(file.fileno()), None, num_rows)
            journal._begin(manifest)
        except OSError as error:
            raise UsageError(f"can't write to {tempfile.gettempdir()}: {error.strerror} (TMPDIR chooses)") from error
        return journal

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __contains__(self, row: int) -> bool:
        return self._states[row - self._first_row] != _NOT_FINISHED

    @property
    def num_finished(self) -> int:
        return self.num_ok + self.num_error

    @property
    def is_complete(self) -> bool:
        return self.num_finished == len(self._states)

    def finished_rows(self) -> bytes:
        """One byte per row: 0 if it is not finished."""
        return bytes(self._states)

    def append(self, row: int, record: bytes, *, ok: bool) -> None:
        """Adds a finished row. After this a kill of the process can't lose it; a power cut can lose the last second.

        Raises:
            RunError: the disk is full or fails. The half-written line is removed if the disk allows it.
        """
        offset = self._end
        self._is_finished = False
        try:
            self._write(seal(record, row=row, ok=ok))
            self._num_unsynced += 1
            if self._num_unsynced >= _SYNC_ROWS or time.monotonic() - self._synced_at >= _SYNC_SECONDS:
                self._sync_in_background()
        except OSError as error:
            raise self._broken(error) from error
        self._mark(row, offset, ok)

    def sync(self) -> None:
        """Waits until everything written is on the disk.

        Raises:
            RunError: the disk fails.
        """
        try:
            if self._syncing is not None:
                self._syncing.result()
            os.fsync(self._descriptor)
        except OSError as error:
            raise self._broken(error) from error

    def records(self) -> Iterator[bytes]:
        """The finished rows' records in input order.

        Raises:
            RunError: a line was damaged since the journal was opened.
        """
        for row, (state, offset) in enumerate(zip(self._states, self._offsets, strict=True), self._first_row):
            if state == _NOT_FINISHED:
                continue
            entry = unseal(self._line_at(offset))
            if entry is None or entry.row != row:
                raise RunError(f"{self._name}: the line of row {row} is damaged: run again")
            yield entry.record

    def close(self) -> None:
        """Unlocks and closes. A new journal without a finished row is removed, any other is kept."""
        if self._path is not None and self._is_new and not self.num_finished and self._descriptor >= 0:
            with suppress(OSError):
                self._path.unlink()
        self._release()

    def mark_finished(self) -> None:
        """Marks that the output is written, and keeps the journal under its `finished_name`.

        From now on a run with other settings or another input may replace it, as it may replace the output.
        """
        with suppress(OSError):  # without the mark the next run only asks for --restart
            if not self._is_finished:
                self._write(seal(b'{"finished": true}', row=FINISHED_ROW, ok=True))
                self._is_finished = True
                os.fsync(self._descriptor)
            if self._path is not None:
                self._path.replace(finished_name(self._path))
                sync_folder(self._path.parent)

    def remove(self) -> None:
        """Removes the journal: the output is written."""
        if self._path is not None:
            with suppress(OSError):  # a journal that stays makes the next run write the same output again
                self._path.unlink()
        self._release()

    @property
    def _rows(self) -> range:
        return range(self._first_row, self._first_row + len(self._states))

    @property
    def _name(self) -> str:
        return "the temporary journal" if self._path is None else str(self._path)

    def _broken(self, error: OSError) -> RunError:
        return RunError(f"can't write {self._name}: {error.strerror or error}")

    def _release(self) -> None:
        self._syncer.shutdown()
        if self._descriptor >= 0:
            with suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1

    def _write(self, line: bytes) -> None:
        try:
            write_at(self._descriptor, line, self._end)
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._end)
            raise
        self._end += len(line)

    def _sync_in_background(self) -> None:
        """Syncs in a thread, so that no step waits for the disk. Its error is raised when the next sync is due."""
        if self._syncing is not None:
            if not self._syncing.done():
                return
            self._syncing.result()
        self._num_unsynced = 0
        self._synced_at = time.monotonic()
        self._syncing = self._syncer.submit(os.fsync, self._descriptor)

    def _line_at(self, offset: int) -> bytes:
        size = _READ_BYTES
        while True:
            data = os.pread(self._descriptor, size, offset)
            end = data.find(b"\n") + 1
            if end or len(data) < size:
                return data[:end]
            size *= 4

    # --- resuming what an earlier run left -----------------------------------------------------------------------

    def _begin(self, manifest: Manifest) -> None:
        self._is_new, self._is_finished = True, False
        self._end = 0
        os.ftruncate(self._descriptor, 0)
        self._write(manifest.encode())
        os.fsync(self._descriptor)

    def _resume(self, manifest: Manifest, retry_errors: bool) -> None:
        lines = self._lines()
        _, first, entry = next(lines, (0, b"", None))
        if not first.endswith(b"\n") and BEGINNING.startswith(first[: len(BEGINNING)]):
            # new, or the run was killed before its first line was whole
            self._begin(manifest)
            return
        stored = self._read_manifest(entry)
        self._end = len(first)
        damaged_at: int | None = None
        for offset, line, entry in lines:
            if entry is None:
                damaged_at = offset if damaged_at is None else damaged_at
            elif damaged_at is not None:
                raise UsageError(self._damage_message(damaged_at))
            else:
                self._end = offset + len(line)
                self._is_finished = entry.row == FINISHED_ROW
                if entry.row == MANIFEST_ROW:
                    stored = self._read_manifest(entry)
                elif 0 <= entry.row - self._first_row < len(self._states):
                    self._mark(entry.row, offset, entry.ok)
        differences = manifest.differences(stored)
        if differences and self._is_finished:
            self._unfinish(self._rows)
            self._begin(manifest)
            return
        if differences:
            raise UsageError(f"{self._path} is of another run ({'; '.join(differences)}): {_ADVICE}")
        self.stored_versions = stored.versions
        os.ftruncate(self._descriptor, self._end)
        if stored.input != manifest.stored().input or stored.started != manifest.started:
            self._write(manifest.encode())
        os.fsync(self._descriptor)
        if retry_errors:
            self.num_retried = self.num_error
            self._unfinish(row for row, state in enumerate(self._states, self._first_row) if state == _ERROR)
        self.num_resumed = self.num_finished

    def _lines(self) -> Iterator[tuple[int, bytes, Entry | None]]:
        offset = 0
        with open(self._descriptor, "rb", closefd=False) as file:
            for line in file:
                yield offset, line, unseal(line)
                offset += len(line)

    def _damage_message(self, offset: int) -> str:
        kept = plural(self.num_finished, "row")
        return (
            f"{self._path} is damaged at byte {offset}, with whole records behind it: `truncate -s {offset} "
            f"{shlex.quote(str(self._path))}` keeps the {kept} before it and the same command goes on from there; "
            "--restart starts over"
        )

    def _read_manifest(self, entry: Entry | None) -> StoredManifest:
        stored = read_manifest(entry)
        if stored is None:
            raise UsageError(f"{self._path} is not a journal that this version can resume: {_ADVICE}")
        return stored

    def _mark(self, row: int, offset: int, ok: bool) -> None:
        self._set_state(row, _OK if ok else _ERROR)
        self._offsets[row - self._first_row] = offset

    def _unfinish(self, rows: Iterable[int]) -> None:
        for row in rows:
            self._set_state(row, _NOT_FINISHED)

    def _set_state(self, row: int, state: int) -> None:
        index = row - self._first_row
        before = self._states[index]
        self.num_ok += (state == _OK) - (before == _OK)
        self.num_error += (state == _ERROR) - (before == _ERROR)
        self._states[index] = state

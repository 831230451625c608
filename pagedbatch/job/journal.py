"""OUT.jsonl.journal: what is finished so far, safe against a kill at any moment. Knows records as bytes only.

The first line is the manifest: what makes the results what they are. Each further line is a finished record, in
completion order, to whose JSON object one key is added at the end:

    {"id": "a", ..., "error": null, "journal": {"row": 0, "ok": true, "crc32": "89abcdef"}}

The checksum covers the record, the row number and `ok`. A line that was cut by a kill, or damaged, counts as not
written: its row runs again. The journal is locked while it is open, so that two runs can't share an output.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
import zlib
from array import array
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

from pagedbatch.errors import RunError, UsageError

FORMAT = 1
_SYNC_SECONDS = 1.0
_TRAILER = b', "journal": '


@dataclass(frozen=True, slots=True)
class Manifest:
    """What the results of a run depend on, and for the record the versions that made them.

    Two runs whose manifests differ in anything but `versions` don't share a journal.
    """

    input: Mapping[str, Any]
    model: str
    settings: Mapping[str, Any]
    versions: Mapping[str, str]

    def encode(self) -> bytes:
        record = json.dumps({"pagedbatch_journal": FORMAT, **asdict(self)}, ensure_ascii=False).encode()
        return seal(record, row=-1, ok=True)

    def differences(self, stored: Mapping[str, Any]) -> list[str]:
        """What differs from a stored manifest, each as `name: was X, now Y`."""
        mine = json.loads(json.dumps(asdict(self)))
        return [
            f"{name}: was {was!r}, now {now!r}"
            for part in ("input", "model", "settings")
            for name, was, now in _compare(part, stored.get(part), mine[part])
        ]


def _compare(part: str, was: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    if not (isinstance(was, dict) and isinstance(now, dict)):
        if was != now:
            yield part, was, now
        return
    for name in dict.fromkeys([*was, *now]):
        if was.get(name) != now.get(name):
            yield name if part == "settings" else f"{part} {name}", was.get(name), now.get(name)


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of the journal that is whole: the record as it goes to the output, and what the journal added."""

    record: bytes
    row: int
    ok: bool


def seal(record: bytes, *, row: int, ok: bool) -> bytes:
    """A journal line, with its line end, from the bytes of a JSON object."""
    trailer = json.dumps({"row": row, "ok": ok, "crc32": _checksum(record, row, ok)})
    return b"".join((record[:-1], _TRAILER, trailer.encode(), b"}\n"))


def unseal(line: bytes) -> Entry | None:
    """The entry in a journal line, or None if it is cut or damaged."""
    body, found, rest = line.rpartition(_TRAILER)
    if not found or not rest.endswith(b"}\n"):
        return None
    record = body + b"}"
    try:
        trailer = json.loads(rest[:-2])
        row, ok, checksum = trailer["row"], trailer["ok"], trailer["crc32"]
    except (ValueError, KeyError, TypeError):
        return None
    return Entry(record, row, ok) if checksum == _checksum(record, row, ok) else None


def _checksum(record: bytes, row: int, ok: bool) -> str:
    return f"{zlib.crc32(f'{row} {ok}'.encode(), zlib.crc32(record)):08x}"


class Journal:
    """An open, locked journal. `num_ok` and `num_error` count its rows, `num_resumed` those found at the start."""

    def __init__(self, file: BinaryIO, path: Path | None) -> None:
        self._file = file
        self._path = path
        self._offsets = array("q")  #: where each row's line begins; 0, the manifest's place, means: not finished
        self._synced_at = time.monotonic()
        self._is_new = False
        self.num_ok = 0
        self.num_error = 0
        self.num_resumed = 0
        self.num_damaged = 0
        self.stored_versions: Mapping[str, str] = {}

    @classmethod
    def open(cls, path: Path, manifest: Manifest, *, num_rows: int, restart: bool = False) -> Journal:
        """Opens the journal at `path`, and takes up what a run with the same manifest left there.

        Rows past `num_rows` stay in the journal and are left out of everything else.

        Raises:
            UsageError: another run has it open, it can't be written, or it belongs to other settings or input.
        """
        file = _open_locked(path)
        journal = cls(file, path)
        try:
            journal._offsets = array("q", bytes(8 * num_rows))
            if restart:
                file.truncate(0)
            journal._take_up(manifest)
        except BaseException:
            file.close()
            raise
        return journal

    @classmethod
    def temporary(cls, file: BinaryIO, manifest: Manifest, *, num_rows: int) -> Journal:
        """A journal in a temporary file, for a run without an output path: nothing to resume."""
        journal = cls(file, None)
        journal._offsets = array("q", bytes(8 * num_rows))
        journal._take_up(manifest)
        return journal

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __contains__(self, row: int) -> bool:
        return self._offsets[row] != 0

    @property
    def num_finished(self) -> int:
        return self.num_ok + self.num_error

    def append(self, row: int, record: bytes, *, ok: bool) -> None:
        """Adds a finished row. When this returns, a kill of the process can't lose it; a power cut can lose a second.

        Raises:
            RunError: the disk is full or fails.
        """
        try:
            offset = self._file.seek(0, os.SEEK_END)
            self._file.write(seal(record, row=row, ok=ok))
            self._file.flush()
            if time.monotonic() - self._synced_at >= _SYNC_SECONDS:
                self.sync()
        except OSError as error:
            raise RunError(f"can't write {self._path or 'the temporary journal'}: {error.strerror}") from error
        self._enter(row, offset, ok)

    def sync(self) -> None:
        """Waits until everything written is on the disk."""
        os.fsync(self._file.fileno())
        self._synced_at = time.monotonic()

    def records(self) -> Iterator[bytes]:
        """The finished rows' records in input order, each as a line of the output.

        Raises:
            RunError: a line that was whole before is not any more.
        """
        for row, offset in enumerate(self._offsets):
            if not offset:
                continue
            self._file.seek(offset)
            entry = unseal(self._file.readline())
            if entry is None or entry.row != row:
                raise RunError(f"{self._path or 'the temporary journal'}: the line of row {row} is damaged: run again")
            yield entry.record + b"\n"

    def close(self) -> None:
        """Unlocks. A journal that is as empty as it was made is removed, any other is kept."""
        if self._file.closed:
            return
        with suppress(OSError):  # a failed write was reported when it failed
            if self._path is not None and self._is_new and not self.num_finished:
                self._path.unlink(missing_ok=True)
            else:
                self.sync()
        with suppress(OSError):
            self._file.close()

    def remove(self) -> None:
        """Ends the journal's life: the output is written."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        self._file.close()

    def _take_up(self, manifest: Manifest) -> None:
        self._file.seek(0)
        first = self._file.readline()
        if not first.endswith(b"\n"):  # new, or killed before its first line was whole
            self._file.seek(0)
            self._file.truncate()
            self._file.write(manifest.encode())
            self._file.flush()
            self.sync()
            self._is_new = True
            return
        self._check_manifest(first, manifest)
        end = offset = len(first)
        for line in self._file:
            entry = unseal(line)
            if entry is not None and entry.row >= 0:
                if entry.row < len(self._offsets):
                    self._enter(entry.row, offset, entry.ok)
            elif line.endswith(b"\n"):
                self.num_damaged += 1
            offset += len(line)
            end = offset if line.endswith(b"\n") else end
        self._file.truncate(end)
        self.num_resumed = self.num_finished

    def _check_manifest(self, line: bytes, manifest: Manifest) -> None:
        advice = "pass --restart to begin anew, or choose another --output"
        entry = unseal(line)
        stored = {} if entry is None else json.loads(entry.record)
        if stored.get("pagedbatch_journal") != FORMAT:
            raise UsageError(f"{self._path} is not a journal that this version can resume: {advice}")
        differences = manifest.differences(stored)
        if differences:
            raise UsageError(f"{self._path} is of another run ({'; '.join(differences)}): {advice}")
        self.stored_versions = stored.get("versions", {})

    def _enter(self, row: int, offset: int, ok: bool) -> None:
        if not self._offsets[row]:
            self.num_ok += ok
            self.num_error += not ok
        self._offsets[row] = offset


def _open_locked(path: Path) -> BinaryIO:
    """Opens and locks `path`. Locking again when the file was replaced meanwhile: its owner removes it at the end."""
    while True:
        try:
            file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b")
        except OSError as error:
            raise UsageError(f"can't write {path}: {error.strerror}") from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise UsageError(f"{path} is in use: another run writes the same output") from None
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
        file.close()

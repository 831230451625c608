"""Files that survive a kill or a power cut whole, and the lock that keeps two runs off one output."""

from __future__ import annotations

import fcntl
import io
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from pagedbatch.errors import RunError, UsageError

_BUFFER_BYTES = 1 << 20


def temporary_name(path: Path) -> Path:
    """Where the file that will replace `path` is written."""
    return path.with_name(path.name + ".tmp")


def write_at(descriptor: int, data: bytes, offset: int) -> None:
    """Writes all of `data` at `offset`."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def sync_folder(folder: Path) -> None:
    """Waits until the folder's entries (created, renamed and removed files) are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that replaces `path` when the block ends without an error.

    Readers see the old file or the whole new one, even after a crash.

    Raises:
        RunError: the disk is full or fails; `path` is the old file, or the new one that a power cut may still undo.
    """
    temporary = temporary_name(path)
    try:
        raw = _Descriptor(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666))
        try:
            file = io.BufferedWriter(raw, _BUFFER_BYTES)
            yield file
            file.flush()
            os.fsync(raw.fileno())
        finally:
            raw.close()
        os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            raise RunError(f"can't write {path}: {error.strerror or error}") from error
        raise


def write_atomically(path: Path, chunks: Iterable[bytes]) -> None:
    """Replaces `path` by a file of `chunks`.

    Raises:
        RunError: see `replacing`.
    """
    with replacing(path) as file:
        file.writelines(chunks)


def open_locked(path: Path) -> int:
    """Opens and locks `path`, which is made if it is missing. The lock ends when the descriptor is closed.

    Raises:
        UsageError: another process holds the lock, or it can't be opened or locked.
    """
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise UsageError(f"can't write {path}: {error.strerror}") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                raise UsageError(f"{path} is in use: another run writes the same output") from None
            raise UsageError(f"{path} can't be locked: {error.strerror}") from None
        with suppress(FileNotFoundError):  # the owner before us may have removed or replaced the file
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        os.close(descriptor)


class _Descriptor(io.RawIOBase):
    """An open descriptor as a raw stream, for buffering."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def write(self, data: Any) -> int:
        return os.write(self._descriptor, data)

    def close(self) -> None:
        if not self.closed:
            super().close()
            os.close(self._descriptor)

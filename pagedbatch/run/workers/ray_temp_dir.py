"""The temporary folder for the logs and sockets of a Ray that a run starts.

Folders that killed runs left behind are removed. A run holds the lock of its folder, and the lock ends with the
process: a folder that can be locked is no longer in use.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pagedbatch.errors import UsageError

_PREFIX = "pagedbatch-ray-"
#: A socket's path may be about twice as long; Ray appends long names to ours.
_MAX_PATH_CHARACTERS = 40


@contextmanager
def ray_temp_dir() -> Iterator[Path]:
    """A new folder in the usual place for temporary files (in `/tmp` if its path is too long), removed afterwards.

    Raises:
        UsageError: nothing can be written or locked there.
    """
    parent = _short_parent()
    for left in parent.glob(f"{_PREFIX}*"):
        _remove_if_left(left)
    folder, lock = _new_locked(parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _new_locked(parent: Path) -> tuple[Path, int]:
    """The folder and the descriptor that holds its lock."""
    while True:
        try:
            folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            # Until it is locked, another run may take it for one that was left.
            with suppress(BlockingIOError, FileNotFoundError):
                return folder, _lock(folder)
        except OSError as error:
            raise UsageError(f"Ray can't keep its files in {parent}: {error.strerror} (TMPDIR chooses)") from None


def _remove_if_left(folder: Path) -> None:
    with suppress(OSError):  # in use, or somebody else's
        lock = _lock(folder)
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _lock(folder: Path) -> int:
    """Raises `OSError` where the folder is locked, gone or not ours to open."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        folder.stat()  # still there, now that nobody else can remove it
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _short_parent() -> Path:
    usual = Path(tempfile.gettempdir())
    return usual if len(str(usual)) <= _MAX_PATH_CHARACTERS - len(f"/{_PREFIX}12345678") else Path("/tmp")

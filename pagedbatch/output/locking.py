"""Who may write an output: whoever holds its journal's lock. Knows paths and descriptors, not what is in them."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from pagedbatch.errors import UsageError


def open_locked(path: Path) -> int:
    """Opens and locks `path`. Locking again when the file was replaced meanwhile: its owner removes it at the end.

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
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        os.close(descriptor)

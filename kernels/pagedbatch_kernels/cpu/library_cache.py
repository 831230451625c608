"""Finds libraries that were built before and may be loaded safely.

A library is named STEM-DIGEST.so: the stem identifies what it was built from, and the digest is the SHA-256 of its
bytes, so that a truncated or modified file is recognised without a second file.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

_ROOT = 0


def why_unsafe(folder: Path) -> str | None:
    """Why another user could add files to `folder` or replace it; None: nobody could."""
    path = folder.resolve()
    found = path.stat()
    if found.st_uid != os.geteuid():
        return f"{path} belongs to another user"
    if _others_write(found):
        return f"others can write to {path} (chmod go-w)"
    for parent in path.parents:
        found = parent.stat()
        if found.st_uid not in (os.geteuid(), _ROOT):
            return f"{parent} belongs to another user"
        if _others_write(found) and not found.st_mode & stat.S_ISVTX:  # in a sticky folder, others can't rename it
            return f"others can write to {parent}"
    return None


def find(folder: Path, stem: str) -> Path | None:
    """A library of that stem that belongs to the user, that nobody else can write, and whose digest is right."""
    for path in sorted(folder.resolve().glob(f"{stem}-*.so")):
        with suppress(OSError):
            if path.name == _name(stem, _own_bytes(path)):
                return path
    return None


def add(folder: Path, stem: str, made: Path) -> Path:
    """Moves a library into the folder, which is on the same file system; returns its new path."""
    made.chmod(0o700)
    path = folder.resolve() / _name(stem, made.read_bytes())
    made.replace(path)
    return path


def _name(stem: str, data: bytes) -> str:
    return f"{stem}-{sha256(data).hexdigest()}.so"


def _own_bytes(path: Path) -> bytes:
    """The contents of a regular file, not a link, that belongs to the user and that nobody else can write.

    Raises:
        OSError: it is another kind of file, or can't be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or _others_write(found):
            raise PermissionError(f"{path} is not the user's own")
        return file.read()


def _others_write(found: os.stat_result) -> bool:
    """Whether anybody but the owner may write. A group with the user as its only member does not count."""
    if found.st_mode & stat.S_IWOTH:
        return True
    return bool(found.st_mode & stat.S_IWGRP) and not _is_own_group(found.st_gid)


def _is_own_group(group_id: int) -> bool:
    """Whether a group is the private one that many systems create per user: the user's name and no other members."""
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(group_id)
    except KeyError:
        return False
    return user.pw_gid == group_id and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}

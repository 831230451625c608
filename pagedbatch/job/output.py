"""Where a run writes, and how a file is replaced whole. Knows bytes and paths, not what they mean."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pagedbatch.errors import RunError, UsageError


@dataclass(frozen=True, slots=True)
class OutputPaths:
    """The files of a run that writes to a file."""

    output: Path
    stats: Path
    journal: Path


def output_paths(output: str, input_name: str) -> OutputPaths | None:
    """The files that belong to `output`, or None for `-`, which is stdout.

    Raises:
        UsageError: nothing can be written there, or it would overwrite the input.
    """
    if output == "-":
        return None
    path = Path(os.path.realpath(output))
    if path.is_dir():
        raise UsageError(f"--output {output} is a folder: name a file in it")
    if path.exists() and not path.is_file():
        raise UsageError(f"--output {output} is not a regular file: use --output - for stdout")
    if not path.parent.is_dir():
        raise UsageError(f"--output {output}: the folder {path.parent} does not exist: make it first")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UsageError(f"--output {output}: the folder {path.parent} can't be written to")
    paths = OutputPaths(
        output=path,
        stats=path.with_name(path.name.removesuffix(".jsonl") + ".stats.json"),
        journal=path.with_name(path.name + ".journal"),
    )
    for own in (paths.output, paths.stats, paths.journal):
        if input_name != "-" and own.exists() and Path(input_name).exists() and own.samefile(input_name):
            raise UsageError(f"--output {output} would overwrite the input {input_name}: choose another name")
    return paths


def write_atomically(path: Path, chunks: Iterable[bytes]) -> None:
    """Replaces `path` by a file of `chunks`: whoever looks sees the old file or the whole new one, even after a crash.

    Raises:
        RunError: the disk is full or fails; `path` is as it was.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.writelines(chunks)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RunError(f"can't write {path}: {error.strerror}") from error


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""The files that belong to an output."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pagedbatch.errors import UsageError
from pagedbatch.output.durable import temporary_name
from pagedbatch.wording import short


@dataclass(frozen=True, slots=True)
class OutputPaths:
    """The files of a run that writes to a file."""

    output: Path
    stats: Path
    journal: Path

    @classmethod
    def of(cls, output: Path) -> Self:
        """By name alone; the file system is not looked at."""
        return cls(
            output=output,
            stats=output.with_name(output.name.removesuffix(".jsonl").removesuffix(".parquet") + ".stats.json"),
            journal=output.with_name(output.name + ".journal"),
        )

    @property
    def is_parquet(self) -> bool:
        return self.output.suffix.lower() == ".parquet"


def finished_name(journal: Path) -> Path:
    """Where a journal stays once its run is finished, for error rows or a higher limit to go on from."""
    return journal.with_suffix(".finished")


def output_paths(output: str, input_name: str) -> OutputPaths | None:
    """The files that belong to `output`, or None for `-`, which is stdout.

    Raises:
        UsageError: nothing can be written there, or it would overwrite the input.
    """
    if output == "-":
        return None
    try:
        return _checked_paths(output, input_name)
    except OSError as error:
        raise UsageError(f"--output {short(output)} can't be written: {error.strerror}") from None
    except ValueError as error:  # a zero byte
        raise UsageError(f"--output {short(output)} is no name for a file: {error}") from None


def _checked_paths(output: str, input_name: str) -> OutputPaths:
    path = Path(os.path.realpath(output))
    if path.is_dir():
        raise UsageError(f"--output {output} is a folder: name a file in it")
    if path.exists() and not path.is_file():
        raise UsageError(f"--output {output} is not a regular file: use --output - for stdout")
    if not path.parent.is_dir():
        raise UsageError(f"--output {output}: the folder {path.parent} does not exist: make it first")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UsageError(f"--output {output}: the folder {path.parent} can't be written to")
    paths = OutputPaths.of(path)
    replaced = (paths.output, paths.stats)
    for own in (*replaced, *map(temporary_name, replaced), paths.journal, finished_name(paths.journal)):
        if own.is_dir():
            raise UsageError(f"--output {output}: {own} is a folder where the run needs a file: choose another name")
        if input_name != "-" and own.exists() and os.path.exists(input_name) and own.samefile(input_name):
            raise UsageError(f"--output {output} would overwrite the input {input_name}: choose another name")
    return paths

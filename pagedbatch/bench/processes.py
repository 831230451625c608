"""Runs one side of a comparison in a process of its own, and tells what that process took. Knows no model."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass

from pagedbatch.errors import RunError


@dataclass(frozen=True, slots=True)
class ProcessCost:
    """`seconds` from start to exit; `peak_bytes` is the most memory that was resident, None where it isn't told."""

    seconds: float
    peak_bytes: int | None


def run_python(arguments: Sequence[str], what: str) -> ProcessCost:
    """Runs this Python with `arguments`; what it prints is shown only if it fails.

    Raises:
        RunError: it exited with an error; the message ends with its last line.
    """
    with tempfile.TemporaryFile() as printed:
        began = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, *arguments], stdout=printed, stderr=printed, stdin=subprocess.DEVNULL
        )
        try:
            exit_code, peak_bytes = _wait(process)
        except BaseException:
            process.kill()
            process.wait()
            raise
        seconds = time.perf_counter() - began
        if exit_code != 0:
            printed.seek(0)
            lines = printed.read().decode(errors="replace").strip().splitlines()
            raise RunError(f"{what} failed (exit code {exit_code}): {lines[-1] if lines else 'it said nothing'}")
    return ProcessCost(seconds, peak_bytes)


def _wait(process: subprocess.Popen[bytes]) -> tuple[int, int | None]:
    if not hasattr(os, "wait4"):
        return process.wait(), None
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    unit = 1 if sys.platform == "darwin" else 1024
    return process.returncode, usage.ru_maxrss * unit

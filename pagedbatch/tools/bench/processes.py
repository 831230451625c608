"""Processes of a benchmark: how one is started, measured and asked.

The process of `pagedbatch bench` itself loads neither torch nor a model: on Linux the peak memory of a child starts at
what its parent held.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedbatch.errors import ExitCode, PagedBatchError, RunError, UsageError
from pagedbatch.run.interrupts import Interrupts


@dataclass(frozen=True, slots=True)
class ProcessCost:
    """`seconds` from start to exit; `peak_bytes` is the peak of resident memory, None if the system doesn't tell."""

    seconds: float
    peak_bytes: int | None


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a child, and what it cost."""

    values: dict[str, Any]
    cost: ProcessCost


def run_python(arguments: Sequence[str], what: str) -> ProcessCost:
    """Runs this Python with `arguments`; what it prints is shown only if it fails.

    The current folder is kept off its path (-P): a user's `tokenize.py` there must not hide the library's.

    Raises:
        UsageError: it exited with the code of a usage error.
        RunError: it exited with another code. Both messages end with the last line that it printed.
    """
    with tempfile.TemporaryFile() as printed:
        began = time.perf_counter()
        with Interrupts() as interrupts:
            interrupts.deferred = True  # until there is a process that can be ended
            process = subprocess.Popen(
                [sys.executable, "-P", *arguments], stdout=printed, stderr=printed, stdin=subprocess.DEVNULL
            )
            try:
                interrupts.deferred = False
                if interrupts.requested:
                    raise KeyboardInterrupt
                exit_code, peak_bytes = _wait(process)
            except BaseException:
                process.kill()
                process.wait()
                raise
        seconds = time.perf_counter() - began
        if exit_code != 0:
            printed.seek(0)
            lines = printed.read().decode(errors="replace").strip().splitlines()
            last = lines[-1].removeprefix("error: ") if lines else "it said nothing"
            if exit_code == ExitCode.USAGE:
                raise UsageError(last)
            raise RunError(f"{what} failed ({_how(exit_code)}): {last}")
    return ProcessCost(seconds, peak_bytes)


def ask(module: str, question: Mapping[str, Any], what: str) -> Answer:
    """Runs a module that ends in `answer(...)`, in a process of its own.

    Raises:
        UsageError, RunError: as `run_python`.
    """
    with tempfile.TemporaryDirectory(prefix="pagedbatch-bench-") as folder:
        asked, answered = Path(folder) / "question.json", Path(folder) / "answer.json"
        asked.write_text(json.dumps(question), encoding="utf-8")
        cost = run_python(["-m", module, str(asked), str(answered)], what)
        return Answer(json.loads(answered.read_text(encoding="utf-8")), cost)


def answer(function: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
    """The main function of a child: answers the question that `ask` asked."""
    asked, answered = map(Path, sys.argv[1:])
    try:
        values = function(json.loads(asked.read_text(encoding="utf-8")))
    except PagedBatchError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    answered.write_text(json.dumps(values), encoding="utf-8")


def _wait(process: subprocess.Popen[bytes]) -> tuple[int, int | None]:
    if not hasattr(os, "wait4"):
        return process.wait(), None
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    unit = 1 if sys.platform == "darwin" else 1024
    return process.returncode, usage.ru_maxrss * unit


def _how(exit_code: int) -> str:
    if exit_code == -signal.SIGKILL:
        return "killed, probably for want of memory"
    return f"ended by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exit code {exit_code}"

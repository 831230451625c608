"""Runs a compiler that may fail, hang or print without end."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress

_KEPT_BYTES = 1 << 16
_POLL_SECONDS = 0.05


class CompilerError(Exception):
    """The compiler failed. The message is one line."""


def run_compiler(command: Sequence[str], time_limit: float) -> None:
    """Runs `command`, and kills it with all that it started after `time_limit` seconds.

    Raises:
        CompilerError: it can't be started, fails or takes too long.
    """
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise CompilerError(f"{command[0]} can't be started: {error.strerror}") from error
    try:
        output = _output(process, time.monotonic() + time_limit)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if output is None:
        raise CompilerError(f"{command[0]} was given up after {time_limit:g} s")
    if process.returncode != 0:
        raise CompilerError(f"{command[0]} failed: {_first_error(output.decode(errors='replace'))}")


def _output(process: subprocess.Popen[bytes], deadline: float) -> bytes | None:
    """The first 64 KiB that the process prints; None if it has not ended by the deadline."""
    assert process.stdout is not None
    output = bytearray()
    with process.stdout as pipe:
        is_open = True
        while time.monotonic() < deadline:
            has_ended = process.poll() is not None
            ready = select.select([pipe] if is_open else [], [], [], 0 if has_ended else _POLL_SECONDS)[0]
            if ready:
                data = os.read(pipe.fileno(), _KEPT_BYTES)
                output += data[: _KEPT_BYTES - len(output)]
                is_open = bool(data)
            elif has_ended:
                return bytes(output)
            if has_ended and not is_open:
                return bytes(output)
    return None


def _first_error(output: str) -> str:
    lines = output.strip().splitlines()
    return next((line for line in lines if "error" in line), lines[-1] if lines else "no output").strip()

"""A Ray cluster of one machine for tests: what `ray start` starts, and nothing left of it afterwards."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil


@contextmanager
def ray_cluster(num_cpus: int) -> Iterator[str]:
    """Its address. What workers there import is found as it is found here."""
    # Before this process imports Ray. The token is the one that a Ray of our own would have taken, had it come first.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    # The name is short: sockets lie deep in this folder, and theirs may not be long.
    with tempfile.TemporaryDirectory(prefix="", dir="/tmp") as folder:
        command = [
            *(str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--port=0"),
            *(f"--num-cpus={num_cpus}", "--num-gpus=0", "--object-store-memory=100000000"),
            *("--include-dashboard=false", "--disable-usage-stats", f"--temp-dir={folder}"),
        ]
        paths = os.pathsep.join(path for path in sys.path if path)
        head = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            yield _address(head)
        finally:
            for process in [*psutil.Process(head.pid).children(recursive=True), psutil.Process(head.pid)]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            head.communicate()


def _address(head: subprocess.Popen[str]) -> str:
    """Where others reach it, once it is up."""
    assert head.stdout is not None
    said = ""
    for line in head.stdout:
        said += line
        if "will now block" in line:
            break
    found = re.search(r"--address='([^']+)'", said)
    assert found is not None, said
    return found[1]

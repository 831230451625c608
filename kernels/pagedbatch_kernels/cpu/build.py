"""Builds the C++ of this folder into a shared library, once a machine, and loads it. Knows no tensor.

The sources use neither torch's headers nor Python's, so that a build takes seconds and needs no more than a compiler.
Threads are OpenMP's: the library binds to the runtime that torch has loaded, and shares its threads.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

SOURCES = ("attention.cpp", "cache.cpp", "layers.cpp", "products.cpp", "ranking.cpp", "sampling.cpp")
HEADERS = ("chunk.h", "layer_cache.h", "packing.h", "step.h", "tile.h", "tokens.h", "vec.h", "weights.h", "words.h")
#: No -ffast-math, and no contraction: see vec.h.
_FLAGS = (
    *("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno"),
    *("-fopenmp", "-shared", "-fPIC", "-fvisibility=default"),
)


class BuildError(Exception):
    """There is no library and none can be made; says why in one line."""


def find_compiler() -> str | None:
    """The C++ compiler to build with: $CXX, or the first of the usual names."""
    wanted = os.environ.get("CXX")
    return shutil.which(wanted) if wanted else next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


def can_load() -> bool:
    """Whether the library has been built, or there is a compiler to build it with."""
    return library_path().exists() or find_compiler() is not None


def library_path(folder: Path | None = None) -> Path:
    """Where the library for these sources and this CPU belongs; in the user's cache folder if `folder` is None."""
    if folder is None:
        from platformdirs import user_cache_path

        folder = user_cache_path("pagedbatch") / "kernels"
    here = Path(__file__).parent
    parts = [(here / name).read_bytes() for name in (*SOURCES, *HEADERS)]
    # A home folder can be shared by machines whose CPUs differ.
    parts += [" ".join(_flags()).encode(), _cpu_features().encode()]
    key = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    return folder / f"cpu-kernels-{key}.so"


def load_library(notice: Callable[[str], None], folder: Path | None = None) -> ctypes.CDLL:
    """The library, built first where that has not been done.

    Args:
        notice: takes one line when a build begins.
        folder: where libraries are kept; by default the user's cache folder.

    Raises:
        BuildError: no compiler, or it fails, or what it made can't be loaded.
    """
    path = library_path(folder)
    if not path.exists():
        _build(path, notice)
    return _load(path)


def _load(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path} can't be loaded ({error})") from error


def _build(path: Path, notice: Callable[[str], None]) -> None:
    compiler = find_compiler()
    if compiler is None:
        wanted = os.environ.get("CXX")
        raise BuildError(
            f"there is no compiler {wanted!r}, which $CXX names"
            if wanted
            else "there is no C++ compiler (c++, g++, clang++ or what $CXX names)"
        )
    here = Path(__file__).parent
    notice(f"building the CPU kernels, once: {compiler} into {path.parent}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Whole or not at all, whoever else builds the same at the same time.
        with tempfile.TemporaryDirectory(dir=path.parent) as work:
            made = Path(work) / path.name
            command = [compiler, *_flags(), *(str(here / name) for name in SOURCES), "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True, errors="replace")
            if done.returncode != 0:
                raise BuildError(f"{compiler} failed: {_first_error(done.stderr)}")
            _load(made)  # one that can't be loaded must not be kept
            made.replace(path)
    except OSError as error:
        raise BuildError(str(error)) from error


def _flags() -> tuple[str, ...]:
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return (*_FLAGS, "-march=native" if x86 else "-mcpu=native")


def _first_error(stderr: str) -> str:
    lines = stderr.strip().splitlines()
    return next((line for line in lines if "error" in line), lines[-1] if lines else "without a word").strip()


def _cpu_features() -> str:
    """What this CPU can do, as far as the system tells."""
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return f"{platform.machine()} {platform.processor()}"

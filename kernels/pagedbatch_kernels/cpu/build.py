"""Builds the C++ of this folder into a shared library, once per machine, and loads it.

The sources include neither torch's nor Python's headers, so a build takes seconds and needs nothing but a compiler.
OpenMP binds to the runtime that torch has loaded, and shares its threads.

Libraries are kept in the user's cache folder, see `library_cache`. If others could write there, the library is built in
a private folder for this process alone.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from pagedbatch_kernels.cpu.compiler import CompilerError, run_compiler
from pagedbatch_kernels.cpu.library_cache import add, find, why_unsafe

_log = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
#: A compiler that takes longer is killed.
TIME_LIMIT_SECONDS = 180.0
#: No -ffast-math, and no contraction: see vec.h.
_FLAGS = (
    *("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno"),
    *("-fopenmp", "-shared", "-fPIC", "-fvisibility=default"),
)

#: Loaded libraries by path, and failed builds by path and compiler: neither is tried again in this process.
_loaded: dict[Path, ctypes.CDLL] = {}
_failed: dict[tuple[Path, tuple[str, ...]], str] = {}


class BuildError(Exception):
    """The library can't be built or loaded. The message is one line."""


def find_compiler() -> list[str] | None:
    """The command of the C++ compiler: $CXX, which may have arguments, or the first of c++, g++ and clang++."""
    wanted = os.environ.get("CXX")
    if not wanted:
        found = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
        return None if found is None else [found]
    words = [wanted]
    if shutil.which(wanted) is None:  # otherwise it is a path, which may contain spaces
        with suppress(ValueError):
            words = shlex.split(wanted) or words
    found = shutil.which(words[0])
    return None if found is None else [found, *words[1:]]


def can_load() -> bool:
    """Whether the library has been built or there is a compiler to build it."""
    folder = default_folder()
    is_safe = folder.is_dir() and why_unsafe(folder) is None
    return (is_safe and find(folder, library_stem()) is not None) or find_compiler() is not None


def default_folder() -> Path:
    """The folder of built libraries, in the user's cache folder."""
    from platformdirs import user_cache_path

    return user_cache_path("pagedbatch") / "kernels"


def library_stem() -> str:
    """The beginning of the library's file name: a hash of the sources, the flags and this CPU's features."""
    parts = [path.read_bytes() for path in sorted([*_FOLDER.glob("*.cpp"), *_FOLDER.glob("*.h")])]
    # A home folder can be shared by machines with different CPUs.
    parts += [" ".join(_flags()).encode(), _cpu_features().encode()]
    key = sha256(b"\0".join(parts)).hexdigest()[:32]
    return f"cpu-kernels-{key}"


def load_library(folder: Path | None = None) -> ctypes.CDLL:
    """The library, built first if needed. A process loads it once.

    Args:
        folder: of built libraries; `default_folder` if None.

    Raises:
        BuildError: there is no compiler, it fails or takes too long, or its output can't be loaded.
    """
    kept = (default_folder() if folder is None else folder) / library_stem()
    if kept not in _loaded:
        _loaded[kept] = _find_or_build(kept.parent, kept.name)
    return _loaded[kept]


def _find_or_build(folder: Path, stem: str) -> ctypes.CDLL:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        unsafe = why_unsafe(folder)
        if unsafe is not None:
            with tempfile.TemporaryDirectory(prefix="pagedbatch-kernels-") as private:
                building = f"building the CPU kernels for this run alone, as {unsafe}"
                return _load(_build(Path(private), stem, lambda using: _log.info("%s: %s", building, using)))
        found = find(folder, stem) or _build(
            folder, stem, lambda using: _log.info("building the CPU kernels, once: %s into %s", using, folder)
        )
        return _load(found)
    except OSError as error:
        raise BuildError(str(error)) from error


def _load(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path} can't be loaded ({error})") from error


def _build(folder: Path, stem: str, tell: Callable[[str], None]) -> Path:
    compiler = find_compiler()
    if compiler is None:
        wanted = os.environ.get("CXX")
        raise BuildError(
            f"there is no compiler {wanted!r}, which $CXX names"
            if wanted
            else "there is no C++ compiler (c++, g++, clang++ or what $CXX names)"
        )
    attempt = (folder / stem, tuple(compiler))
    if attempt in _failed:
        raise BuildError(_failed[attempt])
    tell(" ".join(compiler))
    with tempfile.TemporaryDirectory(dir=folder) as work:
        made = Path(work) / f"{stem}.so"
        command = [*compiler, *_flags(), *map(str, sorted(_FOLDER.glob("*.cpp"))), "-o", str(made)]
        try:
            run_compiler(command, TIME_LIMIT_SECONDS)
            _load(made)  # a library that can't be loaded must not be kept
        except (CompilerError, BuildError) as error:
            _failed[attempt] = str(error)
            raise BuildError(str(error)) from error
        return add(folder, stem, made)


def _flags() -> tuple[str, ...]:
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return (*_FLAGS, "-march=native" if x86 else "-mcpu=native")


def _cpu_features() -> str:
    """This CPU's features, as far as the system reports them."""
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return f"{platform.machine()} {platform.processor()}"

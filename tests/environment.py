"""The environment that all tests run in, whatever the shell says; child processes inherit it."""

from __future__ import annotations

import atexit
import os
import tempfile
from pathlib import Path

#: What changes how text is rendered, where Ray or the Hub is looked for, or how the program behaves.
UNSET = (
    *("LINES", "NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "PY_COLORS", "GITHUB_ACTIONS"),
    *("TTY_COMPATIBLE", "TTY_INTERACTIVE", "TERMINAL_WIDTH", "PYTHONIOENCODING", "LANG", "LANGUAGE"),
    *("RAY_ADDRESS", "HF_ENDPOINT", "MPLBACKEND", "PAGEDBATCH_TRACEBACK"),
)
SET = {
    # The models here are far too small to gain from threads, and tests that compare logprobs to the last bit need one
    # way of summing.
    "OMP_NUM_THREADS": "1",
    # Wide, so that no line wraps however long a temporary path is; tests of a width name their own.
    "COLUMNS": "1000",
    "TERM": "xterm-256color",
    "LC_ALL": "C.UTF-8",
}


def clean() -> None:
    """Call it before torch or triton is imported, by whichever library comes first."""
    for name in UNSET:
        os.environ.pop(name, None)
    os.environ.update(SET)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Without a GPU triton's kernels run in the interpreter.
    if not (Path("/dev/nvidia0").exists() or Path("/dev/kfd").exists()):
        os.environ.setdefault("TRITON_INTERPRET", "1")
    if not _is_writable(Path.home()):
        home = tempfile.TemporaryDirectory(prefix="pagedbatch-home-", ignore_cleanup_errors=True)
        atexit.register(home.cleanup)
        os.environ["HOME"] = home.name


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)

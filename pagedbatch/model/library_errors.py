"""Turns other libraries' errors into one line of ours, and keeps their output off the terminal."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator

from safetensors import SafetensorError
from transformers.utils import logging as hf_logging

from pagedbatch.errors import PagedBatchError, UsageError
from pagedbatch.wording import cut

_MAX_CHARACTERS = 400
#: Errors whose message is a sentence. Others ("'NoneType' object is not iterable") need their type in front.
_SELF_EXPLANATORY = (OSError, ValueError, ImportError, RuntimeError, SafetensorError)
#: What Rust code raises when it panics; it is no `Exception`.
_RUST_PANIC = "PanicException"


@contextlib.contextmanager
def one_line_errors(what: str) -> Iterator[None]:
    """Turns whatever a library raises inside into one line that begins with `what`. Interrupts pass through.

    Raises:
        UsageError: something was raised.
    """
    try:
        yield
    except PagedBatchError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != _RUST_PANIC:
            raise
        raise UsageError(f"{what}: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """An error's message on one line."""
    if type(error).__name__.startswith("StrictDataclass") and error.__cause__ is not None:
        return " ".join(str(error.__cause__).split())  # names the field; the outer error names classes
    text = cut(" ".join(str(error).split()), _MAX_CHARACTERS)
    if isinstance(error, MemoryError):
        return "not enough memory"
    if not text:
        return type(error).__name__
    return text if isinstance(error, _SELF_EXPLANATORY) else f"{type(error).__name__}: {text}"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bars, log lines and warnings of transformers, and nothing on stderr."""
    level = hf_logging.get_verbosity()
    bars = hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity(logging.ERROR)
    hf_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()


@contextlib.contextmanager
def without_rust_notes() -> Iterator[None]:
    """Holds back what Rust code writes past Python's streams.

    Notes on stdout, which may be the run's output, are dropped. Lines on stderr are written at the end, unless an error
    ends this: then they are traces of a panic.
    """
    try:
        stdout, stderr = os.dup(1), os.dup(2)
    except OSError:  # one of them is closed
        yield
        return
    with tempfile.TemporaryFile() as notes, tempfile.TemporaryFile() as traces:
        os.dup2(notes.fileno(), 1)
        os.dup2(traces.fileno(), 2)
        try:
            yield
            traces.seek(0)
            os.write(stderr, traces.read())
        finally:
            for saved, number in ((stdout, 1), (stderr, 2)):
                os.dup2(saved, number)
                os.close(saved)


def is_installed(module: str) -> bool:
    """Whether a module can be imported; does not import it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False

"""Finds a model's files, and reads their JSON with one clear line for each way in which it can be broken."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedbatch.errors import UsageError
from pagedbatch.model.library_errors import one_line_errors, quiet
from pagedbatch.wording import cut

CONFIG = "config.json"
_LFS_POINTER = b"version https://git-lfs"
_GGUF_MAGIC = b"GGUF"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model by its name: a folder, one GGUF file, or a repository on the Hub (both are None)."""

    name: str
    folder: Path | None = None
    gguf: Path | None = None

    @property
    def arguments(self) -> dict[str, str]:
        """Arguments of `from_pretrained` that name the model."""
        if self.gguf is not None:
            return {"pretrained_model_name_or_path": str(self.gguf.parent), "gguf_file": self.gguf.name}
        return {"pretrained_model_name_or_path": self.name if self.folder is None else str(self.folder)}

    @property
    def config_place(self) -> str:
        """The file that holds the config, for messages."""
        if self.gguf is not None:
            return str(self.gguf)
        return f"{self.name}/{CONFIG}" if self.folder is None else str(self.folder / CONFIG)

    def file(self, name: str) -> Path | None:
        """The path of one of the model's files, downloaded from the Hub if necessary; None if there is none.

        Raises:
            UsageError: there is no such repository, or it can't be reached.
        """
        if self.gguf is not None:
            return None
        if self.folder is not None:
            path = self.folder / name
            return path if path.exists() or path.is_symlink() else None
        from transformers.utils import cached_file

        with one_line_errors(f"model {self.name!r} can't be loaded"), quiet():
            found = cached_file(
                self.name,
                name,
                _raise_exceptions_for_gated_repo=name == CONFIG,
                _raise_exceptions_for_missing_entries=name == CONFIG,
                _raise_exceptions_for_connection_errors=name == CONFIG,
            )
        return None if found is None else Path(found)

    def json_object(self, name: str) -> dict[str, Any] | None:
        """The object in one of the model's JSON files; None if there is no such file.

        Raises:
            UsageError: it can't be read.
        """
        path = self.file(name)
        return None if path is None else read_object(path)


def find_model(model: str) -> ModelSource:
    """Resolves a model's name.

    Raises:
        UsageError: it looks like a path, and there is no model at it.
    """
    path = Path(model).expanduser()
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise UsageError(f"model {model!r}: no such file")
        return _gguf(model, path)
    if path.is_dir():
        return ModelSource(model, folder=path)
    if path.is_file():
        raise UsageError(f"model {model!r} is a file: give the folder that it lies in, or a .gguf file")
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise UsageError(f"model {model!r}: no such folder (give a folder, a Hub id or a .gguf file)")
    return ModelSource(model)


def _gguf(model: str, path: Path) -> ModelSource:
    beginning = first_bytes(path)
    refuse_pointer(path, beginning)
    if not beginning.startswith(_GGUF_MAGIC):
        raise broken(path, f"{'it is empty' if not beginning else 'it is no GGUF file'}: download it again")
    return ModelSource(model, gguf=path)


def broken(path: Path, why: str) -> UsageError:
    """The error of a file that can't be used."""
    return UsageError(f"{path} can't be loaded: {why}")


def first_bytes(path: Path) -> bytes:
    """The first bytes of a file.

    Raises:
        UsageError: it can't be read.
    """
    _refuse_pipe(path)
    try:
        with path.open("rb") as file:
            return file.read(len(_LFS_POINTER))
    except OSError as error:
        raise broken(path, str(error.strerror)) from None


def _refuse_pipe(path: Path) -> None:
    if path.is_fifo():  # opening it would wait for a writer
        raise broken(path, "it is a named pipe, not a file: download it again")


def refuse_pointer(path: Path, beginning: bytes) -> None:
    """
    Raises:
        UsageError: the file is a pointer that Git LFS left in place of the file.
    """
    if beginning.startswith(_LFS_POINTER):
        raise broken(path, "it is a pointer of Git LFS, not the file itself: run `git lfs pull` in its folder")


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        UsageError: it can't be read, is no JSON, or holds something else.
    """
    _refuse_pipe(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise broken(path, str(error.strerror)) from None
    refuse_pointer(path, data)
    if not data.strip():
        raise broken(path, "it is empty: download it again")
    try:
        value = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise broken(path, f"it is not UTF-8 text: byte {error.start} is none") from None
    except json.JSONDecodeError as error:
        raise broken(
            path, f"malformed JSON: {error.msg} (line {error.lineno}, column {error.colno}); is it cut off?"
        ) from None
    except (RecursionError, ValueError):  # nested too deep; an integer of thousands of digits
        raise broken(path, "its JSON is nested too deep, or holds a number that is too long") from None
    if not isinstance(value, dict):
        raise broken(path, f"it must hold a JSON object, and holds {kind_of(value)}")
    return value


def kind_of(value: Any) -> str:
    """JSON's name of a value's type, with an article."""
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def shown(value: Any) -> str:
    """A value as in a JSON file, shortened if it is long."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = ascii(value)
    return cut(text)

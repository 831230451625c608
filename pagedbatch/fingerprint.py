"""What an input or a model holds, in a few bytes, so that a resumed run can tell what changed.

A file is hashed in chunks: appending to it leaves the hashes of what was there, so an input that grew is told from one
that changed. A model's weights are far too large to read whole: their headers and some places all over them are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHUNK_BYTES = 16 << 20
_SAMPLES = 64
_SAMPLE_BYTES = 4096
_WEIGHTS = (".safetensors", ".gguf")
_MODEL_TEXTS = (".json", ".jinja", ".txt", ".model", ".py")


@dataclass(frozen=True, slots=True)
class Content:
    """What an input holds: `size` bytes, or rows, and a hash of each chunk of them.

    `path` is the file, where it is one that may grow: a plain text, whose rows stay where they are.
    """

    name: str
    size: int
    chunks: tuple[str, ...]
    path: Path | None = None
    chunk_bytes: int = CHUNK_BYTES

    def stored(self) -> dict[str, Any]:
        """As a manifest holds it."""
        return {"name": self.name, "size": self.size, "chunk_bytes": self.chunk_bytes, "chunks": list(self.chunks)}

    def digest(self) -> str:
        """All of it in one hash, for whoever asks only whether two inputs are the same."""
        return _digest([str(self.chunk_bytes).encode(), *(chunk.encode() for chunk in self.chunks)])

    def change_since(self, stored: Mapping[str, Any]) -> str | None:
        """How the input differs from a stored one, in words; None if it is the same, or the same with rows added.

        The name does not count, the content does.
        """
        if stored == self.stored() | {"name": stored.get("name")}:
            return None
        was = stored.get("size")
        if not isinstance(was, int) or stored.get("chunk_bytes") != self.chunk_bytes or self.path is None:
            return "input: its content has changed"
        if was > self.size:
            return f"input: was {was} bytes, now {self.size}"
        chunks = [*self.chunks[: was // self.chunk_bytes]]
        if was % self.chunk_bytes:
            chunks.append(_hash_range(self.path, len(chunks) * self.chunk_bytes, was))
        for i, (old, new) in enumerate(zip(stored.get("chunks", ()), chunks, strict=False)):
            if old != new:
                stop = min((i + 1) * self.chunk_bytes, was)
                return f"input: changed between byte {i * self.chunk_bytes} and byte {stop}"
        if not _ends_a_line(self.path, was):
            return f"input: grew from {was} bytes, and what was added continues its last line"
        return None


def file_content(name: str, path: Path, *, may_grow: bool, chunk_bytes: int = CHUNK_BYTES) -> Content:
    """Reads a file once. `may_grow`: it is a plain text of rows, to which rows may be appended."""
    size = path.stat().st_size
    starts = range(0, size, chunk_bytes)
    chunks = tuple(_hash_range(path, start, min(start + chunk_bytes, size)) for start in starts)
    return Content(name, size, chunks, path if may_grow else None, chunk_bytes)


def _hash_range(path: Path, start: int, stop: int) -> str:
    found = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        file.seek(start)
        while start < stop and (data := file.read(min(1 << 20, stop - start))):
            found.update(data)
            start += len(data)
    return found.hexdigest()


def _ends_a_line(path: Path, size: int) -> bool:
    """Whether a row ends at `size`: after a line end, or before one that was added."""
    with path.open("rb") as file:
        file.seek(max(0, size - 1))
        around = file.read(3)
    return size == 0 or around.startswith(b"\n") or around[1:].startswith((b"\n", b"\r\n"))


def model_fingerprint(model: str) -> str:
    """A hash of what a model's files say: whole texts, and of the weights their size, their header and samples.

    A Hub id that is in the local cache is named by its commit; what is no model at all by its own name.
    """
    path = Path(model).expanduser()
    if path.is_file():
        return _digest(_weight_parts(path))
    if path.is_dir():
        return _digest(part for file in sorted(path.iterdir()) for part in _model_parts(file))
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(model, "config.json")
    except HFValidationError:  # loading it will say so
        return model
    return Path(config).parent.name if isinstance(config, str) else model


def _model_parts(file: Path) -> Iterator[bytes]:
    if not file.is_file():
        return
    if file.suffix in _WEIGHTS:
        yield file.name.encode()
        yield from _weight_parts(file)
    elif file.suffix in _MODEL_TEXTS:
        yield file.name.encode()
        yield file.read_bytes()


def _weight_parts(path: Path) -> Iterator[bytes]:
    """The size, the first part, where formats keep their header, and samples from all over the file."""
    size = path.stat().st_size
    yield str(size).encode()
    with path.open("rb") as file:
        yield file.read(1 << 20)
        for i in range(_SAMPLES + 1):
            file.seek(max(0, size - _SAMPLE_BYTES) * i // _SAMPLES)
            yield file.read(_SAMPLE_BYTES)


def _digest(parts: Iterable[bytes]) -> str:
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.hexdigest()

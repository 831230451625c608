"""Opens a file for reading and decompresses it. The format is detected from its first bytes, not from its name."""

from __future__ import annotations

import gzip
import io
from pathlib import Path
from typing import BinaryIO, cast

from pagedbatch.input.files.zstd import ZstdReader, is_zstd

GZIP_MAGIC = b"\x1f\x8b"
_CHUNK_BYTES = 1 << 18


def is_compressed(magic: bytes) -> bool:
    return magic.startswith(GZIP_MAGIC) or is_zstd(magic)


def open_stream(path: Path) -> BinaryIO:
    """The file's bytes, decompressed where it is gzip or zstd, a piece in memory at a time.

    A compressed file that was cut raises `EOFError` when the cut is reached, after everything before it was read.

    Raises:
        UsageError: the file is zstd and the package zstandard is not installed.
    """
    file = path.open("rb")
    magic = file.read(4)
    file.seek(0)
    if is_zstd(magic):
        return io.BufferedReader(ZstdReader(file, path), _CHUNK_BYTES)
    if magic.startswith(GZIP_MAGIC):
        file.close()
        return cast(BinaryIO, gzip.open(path, "rb"))
    return file

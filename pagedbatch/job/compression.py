"""Opens a file for reading, decompressed: told by its first bytes, never by its name. Knows nothing about rows."""

from __future__ import annotations

import gzip
import io
from pathlib import Path
from typing import Any, BinaryIO, cast

from pagedbatch.errors import UsageError

GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_CHUNK_BYTES = 1 << 18


def is_compressed(magic: bytes) -> bool:
    return magic.startswith((GZIP_MAGIC, ZSTD_MAGIC))


def open_stream(path: Path) -> BinaryIO:
    """The file's bytes, decompressed where it is gzip or zstd.

    A compressed file that was cut raises `EOFError` when the cut is reached, after everything before it was read.

    Raises:
        UsageError: the file is zstd and the package zstandard is not installed.
    """
    file = path.open("rb")
    magic = file.read(4)
    file.seek(0)
    if magic == ZSTD_MAGIC:
        return io.BufferedReader(_ZstdStream(file, path), _CHUNK_BYTES)
    if magic.startswith(GZIP_MAGIC):
        file.close()
        return cast(BinaryIO, gzip.open(path, "rb"))
    return file


class _ZstdStream(io.RawIOBase):
    """A zstd file, frame after frame. zstandard's own reader takes a cut file for a complete one."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        try:
            import zstandard
        except ImportError:
            raise UsageError(f"{path} is zstd-compressed: pip install zstandard, or decompress it first") from None
        self._zstandard = zstandard
        self._file = file
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._inside_frame = False
        self._ready = b""

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            compressed = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = self._zstandard.ZstdDecompressor().decompressobj()
                self._inside_frame = False
            compressed = compressed or self._file.read(_CHUNK_BYTES)
            if not compressed:
                if self._inside_frame:
                    raise EOFError("the zstd file ended before the end of its frame")
                return 0
            self._inside_frame = True
            try:
                self._ready = self._frame.decompress(compressed)
            except self._zstandard.ZstdError as error:
                raise OSError(f"damaged zstd data: {error}") from error
            self._inside_frame = not self._frame.eof
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size

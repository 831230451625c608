"""Reads a zstd file block by block, so that no input, however small, expands to more than a block at a time.

zstandard's own readers either hand out all that a piece of input expands to, or take a cut file for a complete one. So
the file is cut into frames and blocks here, as RFC 8878 lays them out, and zstandard decompresses one block at a time.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, BinaryIO

from pagedbatch.errors import UsageError
from pagedbatch.wording import size as size_words

MAGIC = b"\x28\xb5\x2f\xfd"

#: What a frame may ask to be remembered of its output: the limit of the zstd command without --long.
MAX_WINDOW_BYTES = 1 << 27
_MAX_BLOCK_BYTES = 1 << 17
_SKIP_BYTES = 1 << 16
_RLE = 1
_SKIPPABLE_FIRST = tuple(bytes([byte]) for byte in range(0x50, 0x60))
_SKIPPABLE_MAGIC = b"\x2a\x4d\x18"
_CUT = "the zstd file ended before the end of its frame"
_DICTIONARY_ID_BYTES = (0, 1, 2, 4)
_CONTENT_SIZE_BYTES = (0, 2, 4, 8)


def is_zstd(magic: bytes) -> bool:
    """Whether a frame begins with these four bytes: one of data, or one to be skipped, which some writers put first."""
    return magic == MAGIC or (magic[:1] in _SKIPPABLE_FIRST and magic[1:] == _SKIPPABLE_MAGIC)


class ZstdReader(io.RawIOBase):
    """The decompressed bytes of `file`, frame after frame.

    Reading raises `EOFError` where the file was cut, `OSError` where it is damaged or a frame needs too much memory.

    Raises:
        UsageError: the package zstandard is not installed.
    """

    def __init__(self, file: BinaryIO, path: Path) -> None:
        try:
            import zstandard
        except ImportError:
            raise UsageError(f"{path} is zstd-compressed: pip install zstandard, or decompress it first") from None
        self._zstandard = zstandard
        self._file = file
        self._frame: Any = None
        self._has_checksum = False
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            if self._frame is None and not self._begin_frame():
                return 0
            if self._frame is not None:
                self._ready = memoryview(self._next_block())
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size

    def _begin_frame(self) -> bool:
        """Takes in the header of the next frame; one to be skipped is skipped. False: the file ends here."""
        magic = self._file.read(4)
        if not magic:
            return False
        if magic == MAGIC:
            self._frame = self._zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).decompressobj()
            self._decompress(magic + self._frame_header())
        elif len(magic) < len(MAGIC):
            raise EOFError(_CUT)
        elif is_zstd(magic):
            self._skip(int.from_bytes(self._exactly(4), "little"))
        else:
            raise OSError("damaged zstd data: something else follows a frame")
        return True

    def _frame_header(self) -> bytes:
        descriptor = self._exactly(1)
        flags = descriptor[0]
        is_single_segment = bool(flags & 0x20)
        self._has_checksum = bool(flags & 0x04)
        window = b"" if is_single_segment else self._exactly(1)
        dictionary = self._exactly(_DICTIONARY_ID_BYTES[flags & 3])
        content_size = self._exactly(_CONTENT_SIZE_BYTES[flags >> 6] or is_single_segment)
        if is_single_segment:
            needed = int.from_bytes(content_size, "little") + (256 if len(content_size) == 2 else 0)
        else:
            base = 1 << 10 + (window[0] >> 3)
            needed = base + base // 8 * (window[0] & 7)
        if needed > MAX_WINDOW_BYTES:
            raise OSError(
                f"its zstd window of {size_words(needed)} is larger than {size_words(MAX_WINDOW_BYTES)}: "
                "compress it again without --long or --ultra"
            )
        return descriptor + window + dictionary + content_size

    def _next_block(self) -> bytes:
        """What a block expands to; with the last one its frame ends."""
        header = self._exactly(3)
        fields = int.from_bytes(header, "little")
        is_last, kind, size = fields & 1, fields >> 1 & 3, fields >> 3
        if size > _MAX_BLOCK_BYTES:
            raise OSError("damaged zstd data: a block is too large")
        block = header + self._exactly(1 if kind == _RLE else size)
        if is_last and self._has_checksum:
            block += self._exactly(4)
        found = self._decompress(block)
        if is_last:
            self._frame = None
        return found

    def _decompress(self, data: bytes) -> bytes:
        try:
            found: bytes = self._frame.decompress(data)
        except self._zstandard.ZstdError as error:
            raise OSError(f"damaged zstd data: {error}") from error
        return found

    def _exactly(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) < size:
            raise EOFError(_CUT)
        return data

    def _skip(self, size: int) -> None:
        while size:
            size -= len(self._exactly(min(size, _SKIP_BYTES)))

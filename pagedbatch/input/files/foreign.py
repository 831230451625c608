"""Recognises files that hold no rows by their first bytes, and says what to do with each."""

from __future__ import annotations

from pagedbatch.errors import UsageError

_UNPACK = "unpack it first"
_EXPORT = "save its rows as CSV, JSON Lines or Parquet first"

#: What a file of bytes that no text holds begins with, what that is and what to do.
_BINARY: tuple[tuple[bytes, str, str], ...] = (
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK),
    (b"Rar!\x1a\x07", "a RAR archive", _UNPACK),
    (b"BZh", "a bzip2 file", "decompress it first (bunzip2), or use gzip or zstd"),
    (b"\xfd7zXZ\x00", "an xz file", "decompress it first (unxz), or use gzip or zstd"),
    (b"\x04\x22\x4d\x18", "an lz4 file", "decompress it first, or use gzip or zstd"),
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an old Office document", _EXPORT),
    (b"SQLite format 3\x00", "an SQLite database", _EXPORT),
    (b"ARROW1", "an Arrow file", "give the folder that `datasets` saved, or write it as Parquet first"),
    (b"\xff\xff\xff\xff", "an Arrow stream", "give the folder that `datasets` saved, or write it as Parquet first"),
    (b"FEA1", "a Feather file", "write it as Parquet first"),
    (b"PARE", "an encrypted Parquet file", "decrypt it first"),
    (b"ORC", "an ORC file", "write it as Parquet first"),
    (b"Obj\x01", "an Avro file", "write it as Parquet first"),
    (b"\x89HDF", "an HDF5 file", _EXPORT),
    (b"\x93NUMPY", "a NumPy array", _EXPORT),
    (b"\x80\x02", "a Python pickle", _EXPORT),
    (b"\x80\x03", "a Python pickle", _EXPORT),
    (b"\x80\x04", "a Python pickle", _EXPORT),
    (b"\x80\x05", "a Python pickle", _EXPORT),
    (b"\x89PNG", "a PNG image", "prompts are text"),
    (b"\xff\xd8\xff", "a JPEG image", "prompts are text"),
    (b"GIF8", "a GIF image", "prompts are text"),
    (b"RIFF", "an image, a sound or a film", "prompts are text"),
    (b"ID3", "a sound file", "prompts are text"),
    (b"OggS", "a sound or a film", "prompts are text"),
    (b"GGUF", "a model's weights", "give it as --model"),
    (b"\x7fELF", "a program", "give the file with the prompts"),
)
#: The same of files that are text, in small letters.
_TEXT: tuple[tuple[bytes, str, str], ...] = (
    (b"%pdf-", "a PDF document", "extract its text first"),
    (b"{\\rtf", "an RTF document", "save it as plain text first"),
    (b"version https://git-lfs.github.com/spec/", "a Git LFS pointer, not the file itself", "run `git lfs pull`"),
    (b"<!doctype html", "an HTML page", "was it meant to be downloaded as raw data?"),
    (b"<html", "an HTML page", "was it meant to be downloaded as raw data?"),
    (b"<?xml", "an XML document", _EXPORT),
)
_ZIPS = ((b"xl/", "an Excel workbook"), (b"word/", "a Word document"), (b"data.pkl", "a PyTorch checkpoint"))
_TAR_AT = 257
_LOOKED_AT = 1024
_CONTROLS = bytes(byte for byte in range(32) if byte not in b"\t\n\v\f\r\x1b")


def refuse_foreign(name: str, head: bytes) -> None:
    """Refuses a file that begins with `head` if it is plainly something else than rows.

    Raises:
        UsageError: it says what the file is and what to do.
    """
    if head.startswith(b"PK\x03\x04"):
        what = next((what for part, what in _ZIPS if part in head), "a zip archive")
        raise UsageError(f"{name} is {what}: {_UNPACK if what == 'a zip archive' else _EXPORT}")
    if head[_TAR_AT : _TAR_AT + 5] == b"ustar":
        raise UsageError(f"{name} is a tar archive: {_UNPACK}")
    found = [(what, advice) for beginning, what, advice in _TEXT if head[:_LOOKED_AT].lower().startswith(beginning)]
    if is_binary(head):
        found += [(what, advice) for beginning, what, advice in _BINARY if head.startswith(beginning)]
    for what, advice in found:
        raise UsageError(f"{name} is {what}: {advice}")


def is_binary(head: bytes) -> bool:
    """Whether bytes stand there that no text has."""
    return any(byte in _CONTROLS for byte in head[:_LOOKED_AT])

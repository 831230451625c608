"""A line of the journal: a record sealed with its row number and a checksum."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass

#: Row numbers of the entries that are not rows.
MANIFEST_ROW = -1
FINISHED_ROW = -2
_TRAILER = b', "journal": '


@dataclass(frozen=True, slots=True)
class Entry:
    """The record as it goes to the output, its row, and whether it is ok."""

    record: bytes
    row: int
    ok: bool


def seal(record: bytes, *, row: int, ok: bool) -> bytes:
    """The journal line, with its line end, of a record that is a JSON object."""
    word = b"true" if ok else b"false"
    checksum = _checksum(record, row, ok)
    return b'%b%b{"row": %d, "ok": %b, "crc32": "%08x"}}\n' % (record[:-1], _TRAILER, row, word, checksum)


def unseal(line: bytes) -> Entry | None:
    """The entry in a journal line, or None if it is cut or damaged."""
    body, found, rest = line.rpartition(_TRAILER)
    if not found or not rest.endswith(b"}\n"):
        return None
    record = body + b"}"
    try:
        trailer = json.loads(rest[:-2])
        row, ok, checksum = trailer["row"], trailer["ok"], trailer["crc32"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    has_types = type(row) is int and type(ok) is bool
    whole = has_types and checksum == f"{_checksum(record, row, ok):08x}"
    return Entry(record, row, ok) if whole else None


def _checksum(record: bytes, row: int, ok: bool) -> int:
    return zlib.crc32(b"%d %d" % (row, ok), zlib.crc32(record))

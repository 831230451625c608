"""The lines of a journal: the manifest, and sealed records. Knows bytes, and no file."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagedbatch.job.fingerprint import Content

FORMAT = 2
BEGINNING = b'{"pagedbatch_journal": '
MANIFEST_ROW = -1
FINISHED_ROW = -2
_TRAILER = b', "journal": '


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """The model as it was named, and what its files say; the latter counts."""

    name: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What the results of a run depend on, and for the record the versions that made them and when it first started.

    Two runs whose manifests differ in anything but `versions` and `started`, or in rows added to the input, don't share
    a journal.
    """

    input: Content
    model: ModelIdentity
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    started: str | None = None

    def stored(self) -> dict[str, Any]:
        return {
            "pagedbatch_journal": FORMAT,
            "input": self.input.stored(),
            "model": {"name": self.model.name, "fingerprint": self.model.fingerprint},
            "settings": json.loads(json.dumps(dict(self.settings))),
            "versions": dict(self.versions),
            "started": self.started,
        }

    def encode(self) -> bytes:
        return seal(json.dumps(self.stored(), ensure_ascii=False).encode(), row=MANIFEST_ROW, ok=True)

    def differences(self, stored: Mapping[str, Any]) -> list[str]:
        """What differs from a stored manifest, in words."""
        mine = self.stored()
        found = [self.input.change_since(stored["input"])]
        was = stored["model"]
        if was["fingerprint"] != self.model.fingerprint:
            renamed = was["name"] != self.model.name
            found.append(
                f"model: was {was['name']!r}, now {self.model.name!r}" if renamed else "model: its files changed"
            )
        for name in dict.fromkeys([*stored["settings"], *mine["settings"]]):
            old, new = stored["settings"].get(name), mine["settings"].get(name)
            if old != new:
                found.append(f"{name}: was {old!r}, now {new!r}")
        return [difference for difference in found if difference is not None]


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of the journal that is whole: the record as it goes to the output, and what the journal added."""

    record: bytes
    row: int
    ok: bool


def seal(record: bytes, *, row: int, ok: bool) -> bytes:
    """A journal line, with its line end, from the bytes of a JSON object."""
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
        whole = checksum == f"{_checksum(record, row, ok):08x}"
    except (ValueError, KeyError, TypeError):
        return None
    return Entry(record, row, ok) if whole else None


def _checksum(record: bytes, row: int, ok: bool) -> int:
    return zlib.crc32(b"%d %d" % (row, ok), zlib.crc32(record))

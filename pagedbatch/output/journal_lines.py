"""The lines of a journal: the manifest, and sealed records. Knows bytes, and no file."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagedbatch.fingerprint import Content
from pagedbatch.wording import short

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
                found.append(f"{name}: was {short(old)}, now {short(new)}")
        return [difference for difference in found if difference is not None]


def read_manifest(record: bytes) -> dict[str, Any] | None:
    """The stored form of a manifest from its JSON; None if it is none of this version's, whatever else it is."""
    try:
        stored = json.loads(record)
    except (ValueError, RecursionError):
        return None
    if not _fits(stored, _STORED) or stored["pagedbatch_journal"] != FORMAT:
        return None
    return stored if isinstance(stored.get("started"), str | None) else None  # older ones have no start


def _fits(value: Any, shape: Any) -> bool:
    """Whether a JSON value has the shape: a type, the keys of an object, or what all items of a list or object are."""
    if isinstance(shape, dict):
        return isinstance(value, dict) and all(name in value and _fits(value[name], shape[name]) for name in shape)
    if isinstance(shape, _AllItems):
        items = value.values() if isinstance(value, dict) else value
        return isinstance(value, shape.container) and all(_fits(item, shape.item) for item in items)
    return isinstance(value, shape) and (shape is not int or (not isinstance(value, bool) and value >= 0))


@dataclass(frozen=True, slots=True)
class _AllItems:
    container: type
    item: type


#: What is read of a stored manifest; an integer is never below 0.
_STORED: dict[str, Any] = {
    "pagedbatch_journal": int,
    "input": {"name": str, "size": int, "chunk_bytes": int, "chunks": _AllItems(list, str)},
    "model": {"name": str, "fingerprint": str},
    "settings": dict,
    "versions": _AllItems(dict, str),
}


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
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    has_types = type(row) is int and type(ok) is bool
    whole = has_types and checksum == f"{_checksum(record, row, ok):08x}"
    return Entry(record, row, ok) if whole else None


def _checksum(record: bytes, row: int, ok: bool) -> int:
    return zlib.crc32(b"%d %d" % (row, ok), zlib.crc32(record))

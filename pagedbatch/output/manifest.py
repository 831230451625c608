"""The manifest: what the results of a run depend on. A run resumes a journal only if its manifest is the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from pagedbatch.fingerprint import Content
from pagedbatch.output.journal_entry import MANIFEST_ROW, seal, unseal
from pagedbatch.output.paths import finished_name
from pagedbatch.wording import short

FORMAT = 2
BEGINNING = b'{"pagedbatch_journal": '


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """The model's name and a hash of its files. Only the hash counts."""

    name: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What the results of a run depend on; `versions` and `started` are there for the record and don't count.

    `started` is when the run first started, in ISO format: chat templates that write the date write that one, also when
    the run is resumed later.
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
        """What differs from a stored manifest, in words; rows added to the input don't count."""
        model = ModelIdentity(stored["model"]["name"], stored["model"]["fingerprint"])
        found = run_differences((model, self.model), (stored["settings"], self.stored()["settings"]), "was {}, now {}")
        change = self.input.change_since(stored["input"])
        return found if change is None else [change, *found]


def run_differences(
    models: tuple[ModelIdentity, ModelIdentity], settings: tuple[Mapping[str, Any], Mapping[str, Any]], words: str
) -> list[str]:
    """How two runs differ in model and settings. `words` shows two values: `was {}, now {}`."""
    found = []
    if models[0].fingerprint != models[1].fingerprint:
        names = models[0].name, models[1].name
        found.append(f"model: {words.format(*map(repr, names)) if names[0] != names[1] else 'its files changed'}")
    for name in dict.fromkeys([*settings[0], *settings[1]]):
        values = settings[0].get(name), settings[1].get(name)
        if values[0] != values[1]:
            found.append(f"{name}: {words.format(*map(short, values))}")
    return found


def read_manifest(record: bytes) -> dict[str, Any] | None:
    """The stored form of a manifest from its JSON; None if it is anything else."""
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


def first_start(journal: Path | None, manifest: Manifest) -> str:
    """When the run that `journal` would resume first started, in ISO format; now if there is none to resume.

    Only reads: whether the run can be resumed is decided when the journal is opened and locked.
    """
    return (None if journal is None else _stored_start(journal, manifest)) or datetime.now().isoformat()


def _stored_start(journal: Path, manifest: Manifest) -> str | None:
    path = journal if journal.exists() else finished_name(journal)
    try:
        with path.open("rb") as file:
            for line in file:  # the first line, or a later one where an old version began the journal without a start
                entry = unseal(line)
                if entry is None:
                    return None
                stored = json.loads(entry.record) if entry.row == MANIFEST_ROW else {}
                if isinstance(stored.get("started"), str):
                    is_same = not manifest.differences(stored)
                    return datetime.fromisoformat(stored["started"]).isoformat() if is_same else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # opening it will say what is wrong with it
        pass
    return None

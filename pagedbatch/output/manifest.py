"""The manifest: what the results of a run depend on. A run resumes a journal only if its manifest is the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from pagedbatch.fingerprint import Content
from pagedbatch.output.journal_entry import MANIFEST_ROW, Entry, seal, unseal
from pagedbatch.output.paths import finished_name
from pagedbatch.stats.record import Record, key
from pagedbatch.stats.schema import Count, ModelIdentity
from pagedbatch.wording import short

FORMAT = 2
BEGINNING = b'{"pagedbatch_journal": '


@dataclass(frozen=True, slots=True)
class StoredInput(Record):
    """An input as `Content.stored` describes it."""

    name: str = key("as it was given")
    size: Count = key("bytes, or rows")
    chunk_bytes: Count = key("size of a chunk")
    chunks: list[str] = key("hash of each chunk")


@dataclass(frozen=True, slots=True)
class StoredManifest(Record):
    """A manifest as it is in the journal."""

    pagedbatch_journal: Count = key("version of the journal's format")
    input: StoredInput = key("content of the input")
    model: ModelIdentity = key("the model")
    settings: dict[str, Any] = key("every setting that results depend on")
    versions: dict[str, str] = key("versions of the packages")
    started: str | None = key("when the run first started", default=None)


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

    def stored(self) -> StoredManifest:
        settings = json.loads(json.dumps(dict(self.settings)))
        content = StoredInput(**self.input.stored())
        return StoredManifest(FORMAT, content, self.model, settings, dict(self.versions), self.started)

    def encode(self) -> bytes:
        return seal(json.dumps(self.stored().to_json(), ensure_ascii=False).encode(), row=MANIFEST_ROW, ok=True)

    def differences(self, stored: StoredManifest) -> list[str]:
        """What differs from a stored manifest, in words; rows added to the input don't count."""
        found = run_differences((stored.model, self.model), (stored.settings, self.stored().settings), "was {}, now {}")
        change = self.input.change_since(stored.input.to_json())
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


def read_manifest(entry: Entry | None) -> StoredManifest | None:
    """The manifest in a journal entry; None if the entry is anything else."""
    if entry is None or entry.row != MANIFEST_ROW:
        return None
    try:
        stored = StoredManifest.from_json(json.loads(entry.record))
    except (ValueError, RecursionError):
        return None
    return stored if stored.pagedbatch_journal == FORMAT else None


def first_start(journal: Path | None, manifest: Manifest) -> str:
    """When the run that `journal` would resume first started, in ISO format; now if there is none to resume.

    Only reads: whether the run can be resumed is decided when the journal is opened and locked.
    """
    return (None if journal is None else _stored_start(journal, manifest)) or datetime.now().isoformat()


def _stored_start(journal: Path, manifest: Manifest) -> str | None:
    path = journal if journal.exists() else finished_name(journal)
    with suppress(OSError, ValueError), path.open("rb") as file:  # opening the journal will say what is wrong with it
        for line in file:  # the first line, or a later one where an old version began the journal without a start
            entry = unseal(line)
            if entry is None:
                return None
            stored = read_manifest(entry)
            if stored is not None and stored.started is not None:
                is_same = not manifest.differences(stored)
                return datetime.fromisoformat(stored.started).isoformat() if is_same else None
    return None

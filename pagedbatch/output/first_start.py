"""When a run first started: chat templates that write the date write that one, also when the run is resumed later."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

from pagedbatch.output.journal import finished_name
from pagedbatch.output.journal_lines import MANIFEST_ROW, Manifest, unseal


def first_start(journal: Path | None, manifest: Manifest) -> str:
    """When the run that the journal would resume began, in ISO format; now, where there is none to resume.

    The journal is not opened as such: whoever does that, with its lock, decides whether it can be resumed.
    """
    return (None if journal is None else _stored_start(journal, manifest)) or datetime.now().isoformat()


def _stored_start(journal: Path, manifest: Manifest) -> str | None:
    path = journal if journal.exists() else finished_name(journal)
    try:
        with path.open("rb") as file:
            for line in file:  # the first line, unless an older version wrote it, that kept no start
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

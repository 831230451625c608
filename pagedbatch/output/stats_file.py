"""OUT.stats.json: what a run was told, what it did and what it cost; written, and read again."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pagedbatch import __version__
from pagedbatch.output.durable import write_atomically
from pagedbatch.output.journal import Journal
from pagedbatch.output.totals import Totals
from pagedbatch.params import READERS, GenerationParams
from pagedbatch.settings import RUN_OPTIONS, RunSettings
from pagedbatch.stats.memory import MemoryAccount
from pagedbatch.stats.record import RecordError
from pagedbatch.stats.schema import RowCounts, Setting, Stats, Throughput, Worker

_PACKAGES = ("torch", "transformers", "tokenizers", "triton", "numpy", "xgrammar")


def versions() -> dict[str, str]:
    """The versions that results depend on, from the installed packages' metadata: nothing is imported."""
    found = {"pagedbatch": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def describe_settings(
    settings: RunSettings, params: GenerationParams, model_defaults: Mapping[str, Any], used: Mapping[str, Any]
) -> dict[str, Setting]:
    """Each setting's value and source; `used` has what an `auto` stood for. `params` are those of a plain row."""
    described = {}
    for name in RUN_OPTIONS:
        described[name] = Setting(value=getattr(settings, name), source=settings.origin(name), used=used.get(name))
    for name, value in asdict(params).items():
        source = settings.origin(name)
        if source == "default" and name in model_defaults and value == READERS[name](name, model_defaults[name]):
            source = "model"
        described[name] = Setting(value=dict(value) if name == "logit_bias" else value, source=source)
    return described


def build_stats(
    *,
    settings: dict[str, Setting],
    num_rows: int,
    journal: Journal,
    totals: Totals,
    startup_seconds: float,
    account: MemoryAccount,
    workers: list[Worker] | None,
) -> Stats:
    """The stats of a run, finished or not. Rows count the resumed ones; tokens and times are this run's own."""
    return Stats(
        settings=settings,
        versions=versions(),
        rows=RowCounts(total=num_rows, ok=journal.num_ok, error=journal.num_error, resumed=journal.num_resumed),
        throughput=Throughput.of(
            startup_seconds=startup_seconds,
            seconds=totals.seconds,
            prompt_tokens=totals.prompt_tokens,
            output_tokens=totals.output_tokens,
        ),
        memory=account.memory(),
        time=account.time(),
        lengths=account.lengths(),
        timeline=account.timeline(),
        workers=workers,
    )


def write_stats(path: Path, stats: Stats) -> None:
    """Writes a stats file, whole or not at all.

    Raises:
        RunError: it can't be written.
    """
    text = json.dumps(stats.to_json(), indent=2, ensure_ascii=False, allow_nan=False)
    write_atomically(path, [text.encode(), b"\n"])


def read_stats(path: Path) -> Stats:
    """Reads a stats file that this or an older version wrote.

    Raises:
        OSError: it can't be read.
        RecordError: it is not a stats file.
    """
    data = path.read_bytes()
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise RecordError("not JSON") from None
    return Stats.from_json(value)

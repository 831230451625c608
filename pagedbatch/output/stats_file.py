"""OUT.stats.json: puts together what a run was told, what it did and what it cost. Knows no engine and no file."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pagedbatch import __version__
from pagedbatch.output.journal import Journal
from pagedbatch.output.totals import Totals
from pagedbatch.params import READERS, GenerationParams
from pagedbatch.settings import RUN_OPTIONS, RunSettings
from pagedbatch.stats.memory import MemoryAccount

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
) -> dict[str, dict[str, Any]]:
    """Each setting's value and source; `used` adds what an `auto` came to. `params` are a plain row's."""
    described: dict[str, dict[str, Any]] = {}
    for name in RUN_OPTIONS:
        described[name] = {"value": getattr(settings, name), "source": settings.origin(name)}
    for name, value in asdict(params).items():
        source = settings.origin(name)
        if source == "default" and name in model_defaults and value == READERS[name](name, model_defaults[name]):
            source = "model"
        described[name] = {"value": dict(value) if name == "logit_bias" else value, "source": source}
    for name, value in used.items():
        described[name]["used"] = value
    return described


def build_stats(
    *,
    settings: Mapping[str, Any],
    num_rows: int,
    journal: Journal,
    totals: Totals,
    startup_seconds: float,
    account: MemoryAccount,
    workers: list[dict[str, Any]] | None,
) -> dict[str, Any]:
    """The whole account of a run, finished or not. Rows count the resumed ones; tokens and times are this run's own.

    `workers` has an entry each; None: there were none, the run was one process.
    """
    seconds = totals.seconds
    stats = {
        "settings": settings,
        "versions": versions(),
        "rows": {
            "total": num_rows,
            "ok": journal.num_ok,
            "error": journal.num_error,
            "resumed": journal.num_resumed,
        },
        "throughput": {
            "startup_seconds": round(startup_seconds, 4),
            "seconds": round(seconds, 4),
            "prompt_tokens": totals.prompt_tokens,
            "output_tokens": totals.output_tokens,
            "output_tokens_per_second": round(totals.output_tokens / seconds, 3) if seconds else 0.0,
        },
        "memory": account.memory(),
        "time": account.time(),
        "lengths": account.lengths(),
        "timeline": account.timeline(),
    }
    return stats if workers is None else stats | {"workers": workers}

"""A simulation's account in the shape of a run's, so that the same report shows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedbatch import __version__
from pagedbatch.tools.simulate.simulate import Simulated


def simulation_stats(found: Simulated, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The sections of OUT.stats.json; `seconds` are the simulation's: no model's speed is claimed."""
    return {
        "simulated": True,
        "settings": settings,
        "versions": {"pagedbatch": __version__},
        "rows": {
            "total": found.num_ok + found.num_error,
            "ok": found.num_ok,
            "error": found.num_error,
            "resumed": 0,
        },
        "throughput": {
            "startup_seconds": 0.0,
            "seconds": round(found.seconds, 4),
            "steps": found.num_steps,
            "prompt_tokens": found.prompt_tokens,
            "output_tokens": found.output_tokens,
            "output_tokens_per_second": round(found.output_tokens / found.seconds, 3) if found.seconds else 0.0,
        },
        "memory": found.account.memory(),
        "time": found.account.time(),
        "lengths": found.account.lengths(),
        "timeline": found.account.timeline(),
    }

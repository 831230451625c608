"""Stats files to report on: one by hand, and one of each recipe, from an engine under its settings. Runs no model."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from fake_runs import fake_engine
from rich.console import Console
from snapshots import finished_row, snapshot

from pagedbatch.outputs import EngineCounters
from pagedbatch.params import GenerationParams, resolve
from pagedbatch.report.summary import summary
from pagedbatch.sequence import Request
from pagedbatch.settings import merge, read_recipe
from pagedbatch.stats.memory import MemoryAccount
from pagedbatch.stats.schema import Stats
from pagedbatch.step import StepSeconds

RECIPES = [
    pytest.param(file, id=file.stem)
    for file in sorted((Path(__file__).resolve().parent.parent / "recipes").glob("*.toml"))
]


def stats_of(account: MemoryAccount, scale: int = 1, steps: int = 2) -> dict[str, Any]:
    """The JSON of a stats file around the account, as a run writes it."""
    return {
        "settings": {
            "model": {"value": "some/model", "source": "command line"},
            "block_size": {"value": 16, "source": "default"},
            "device": {"value": "auto", "source": "default", "used": "cpu"},
            "dtype": {"value": "float32", "source": "command line", "used": "float32"},
            "stop": {"value": ["\u3002"], "source": "recipe"},
            "prompt_template": {"value": "Question: [bold]{question}\nAnswer:" * 9, "source": "recipe"},
        },
        "versions": {"pagedbatch": "0.1.0"},
        "rows": {"total": 10 * scale, "ok": 9 * scale, "error": scale, "resumed": 3 * scale},
        "throughput": {
            "startup_seconds": 4.2,
            "seconds": 2.0 * scale,
            "prompt_tokens": 100 * scale,
            "output_tokens": 60 * scale if steps else 0,
            "output_tokens_per_second": 30.0 * scale if steps else 0.0,
        },
        "memory": account.memory().to_json(),
        "time": account.time().to_json(),
        "timeline": [point.to_json() for point in account.timeline()],
        "lengths": account.lengths().to_json(),
    }


def run_stats(scale: int = 1, steps: int = 2) -> dict[str, Any]:
    """Half of the blocks that tables name are saved; KV used is 75%."""
    account = MemoryAccount(num_blocks=20 * scale, block_size=16, block_bytes=2**20)
    counters = EngineCounters(
        cow_copies=4 * scale,
        preemptions_swap=2 * scale,
        preemptions_recompute=scale,
        swapped_out_blocks=5 * scale,
        swapped_in_blocks=5 * scale,
        recomputed_tokens=44 * scale,
        prefix_queried_tokens=100 * scale,
        prefix_hit_tokens=25 * scale,
        output_tokens=30 * scale,
    )
    for step in range(steps):
        account.observe(
            snapshot(
                step + 1,
                private=5 * scale,
                shared=5 * scale,
                free=10 * scale,
                logical=20 * scale,
                filled_slots=120 * scale,
                swapped=3 * scale,
                running_sequences=4,
                seconds=StepSeconds(model=0.5, attention=0.25, sampling=0.125, swap=0.0625),
                host_seconds=0.0625,
                counters=counters,
            )
        )
    if steps:
        account.add_io(0.125)
        account.row_finished(finished_row(0, 30, [20, 30]), GenerationParams(n=2, temperature=1.0), 4096)
    return stats_of(account, scale, steps)


def shown(stats: dict[str, Any], show: Any = summary, width: int = 80) -> list[str]:
    console = Console(file=StringIO(), width=width)
    show(Stats.from_json(stats), console)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue().splitlines()


def stats_of_recipe(file: Path) -> dict[str, Any]:
    """The stats as they are read from a file; rows begin alike, some of them wider than others."""
    settings = merge({"model": "none"}, read_recipe(str(file)))
    recipe = resolve({}, settings.generation)
    run = fake_engine(num_blocks=settings.num_blocks or 1000, block_size=settings.block_size, num_swap_blocks=32)
    config = run.engine.config
    account = MemoryAccount(num_blocks=config.num_blocks, block_size=config.block_size, block_bytes=4096)
    rows = [
        Request(row, [*range(100, 140), 1000 + row], replace(recipe, max_tokens=20 + 3 * row), rng_key=row)
        for row in range(12)
    ]
    run.add(*rows)
    while run.engine.has_unfinished:
        for output in run.step():
            account.row_finished(output, rows[output.request_id].params, config.max_model_len)
        account.observe(run.snapshots[-1])
    read: dict[str, Any] = json.loads(json.dumps(stats_of(account)))
    return read

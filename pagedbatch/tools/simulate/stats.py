"""A simulation's account in the shape of a run's, so that the same report shows it."""

from __future__ import annotations

from pagedbatch import __version__
from pagedbatch.stats.schema import RowCounts, Setting, Stats, Throughput
from pagedbatch.tools.simulate.simulate import Simulated


def simulation_stats(found: Simulated, settings: dict[str, Setting]) -> Stats:
    """`seconds` are the simulation's: no model's speed is claimed."""
    return Stats(
        simulated=True,
        settings=settings,
        versions={"pagedbatch": __version__},
        rows=RowCounts(total=found.num_ok + found.num_error, ok=found.num_ok, error=found.num_error, resumed=0),
        throughput=Throughput.of(
            startup_seconds=0.0,
            seconds=found.seconds,
            steps=found.num_steps,
            prompt_tokens=found.prompt_tokens,
            output_tokens=found.output_tokens,
        ),
        memory=found.account.memory(),
        time=found.account.time(),
        lengths=found.account.lengths(),
        timeline=found.account.timeline(),
    )

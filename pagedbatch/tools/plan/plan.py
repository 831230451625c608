"""The plan of a run: opens the job as a run would, estimates sizes, simulates the run and judges it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any

from pagedbatch.config import EngineConfig
from pagedbatch.input.hub import go_offline_if_needed
from pagedbatch.output.stats_file import describe_settings, versions
from pagedbatch.run.open import open_input, open_job
from pagedbatch.run.startup import engine_config
from pagedbatch.sequence import Request
from pagedbatch.settings import RunSettings
from pagedbatch.stats.schema import Setting
from pagedbatch.tools.plan.advice import Advice, advise, best_block_size, blocks_wanted
from pagedbatch.tools.plan.forecast import Forecast, by_block_size, forecast, unlimited
from pagedbatch.tools.plan.length_assumption import length_assumptions
from pagedbatch.tools.plan.rows import PlannedRows, read_rows
from pagedbatch.tools.plan.sizes import Sizes, estimate_sizes
from pagedbatch.tools.plan.verdict import Verdict, judge
from pagedbatch.wording import plural


@dataclass(frozen=True, slots=True)
class Forecasts:
    """The simulated part of a plan.

    `by_length` goes from the shortest outputs to the longest, a single forecast if all lengths are known; `likely` is
    the one to count on. `by_block_size` and `advice` are for unlimited memory.
    """

    by_length: list[Forecast]
    likely: Forecast
    by_block_size: list[Forecast]
    advice: Advice
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run would need. `forecasts` is None if no row can run."""

    settings: dict[str, Setting]
    rows: PlannedRows
    sizes: Sizes
    forecasts: Forecasts | None

    def as_dict(self) -> dict[str, Any]:
        """For `--json`: everything but the prompts."""
        rows = {
            "total": self.rows.num_rows,
            "ok": self.rows.num_ok,
            "error": self.rows.num_refused,
            "first_errors": self.rows.refused,
            "truncated": self.rows.num_truncated,
            "simulated": len(self.rows.first),
        }
        prompts = None if self.rows.prompts is None else asdict(self.rows.prompts)
        forecasts = {} if self.forecasts is None else asdict(self.forecasts)
        if forecasts:
            forecasts = {"forecasts": forecasts.pop("by_length"), **forecasts}
        return {
            "settings": {name: setting.to_json() for name, setting in self.settings.items()},
            "versions": versions(),
            "rows": rows,
            "prompts": prompts,
            "sizes": asdict(self.sizes) | {"pool_bytes": self.sizes.pool_bytes, "fits": self.sizes.fits},
            **forecasts,
        }


def make_plan(
    settings: RunSettings,
    *,
    expect_tokens: int | None,
    simulated_rows: int | None,
    notice: Callable[[str], None],
    show_progress: Callable[[str], None],
) -> Plan:
    """Plans a run of `settings` in one process on this machine. Its output file is not looked at.

    Args:
        expect_tokens: the mean length of outputs that may end by themselves.
        simulated_rows: how many of the first rows are simulated; None: as many as take seconds.
        notice: takes a line that a run would print too.
        show_progress: takes a line about progress now and then.

    Raises:
        UsageError: a run would not start.
    """
    go_offline_if_needed(settings.input, settings.model)
    show_progress("opening the input and the model's config")
    if settings.uses_workers:
        notice("planned for one process: each worker would have a pool of its own, and its share of the rows")
    # A strict run is refused because of broken rows; its plan names them.
    settings = replace(settings, strict=False)
    given = open_input(settings, notice)
    with closing(open_job(settings, given, notice)) as opened:
        sizes = estimate_sizes(settings, opened.text.defaults)
        config = engine_config(settings, opened.text.defaults, sizes.num_blocks, sizes.num_swap_blocks)
        rows = read_rows(opened, config, simulated_rows, show_progress)
    described = describe_settings(
        settings,
        opened.text.params,
        opened.text.defaults.generation.values,
        used={"num_blocks": sizes.num_blocks, "device": sizes.device, "dtype": sizes.dtype},
    )
    if not rows.first:
        return Plan(described, rows, sizes, None)
    return Plan(described, rows, sizes, _forecast(rows.first, config, sizes, expect_tokens, show_progress))


def _forecast(
    requests: list[Request],
    config: EngineConfig,
    sizes: Sizes,
    expect_tokens: int | None,
    show_progress: Callable[[str], None],
) -> Forecasts:
    assumptions = length_assumptions(requests, config.block_size, expect_tokens)
    by_length = []
    for assumption in assumptions:
        show_progress(f"simulating {plural(len(requests), 'row')}, outputs: {assumption.name}")
        by_length.append(forecast(requests, assumption, config, sizes.block_bytes))
    likely = next(i for i, each in enumerate(assumptions) if each.is_likely)
    show_progress("simulating other block sizes")
    by_size = by_block_size(requests, assumptions[likely], config, sizes.token_bytes)
    max_width = max(request.params.width for request in requests)
    if assumptions[likely] is assumptions[-1]:
        longest = next(each for each in by_size if each.block_size == config.block_size)
    else:
        longest = forecast(requests, assumptions[-1], unlimited(requests, config, config.block_size), sizes.block_bytes)
    block_size = best_block_size(by_size)
    # If the pool is large enough anyway, another block size gains nothing.
    if blocks_wanted(longest, max_width) > config.num_blocks and block_size != config.block_size:
        enough = unlimited(requests, config, block_size)
        longest = forecast(requests, assumptions[-1], enough, block_size * sizes.token_bytes)
    return Forecasts(
        by_length=by_length,
        likely=by_length[likely],
        by_block_size=by_size,
        advice=advise(longest, max_width, sizes.token_bytes),
        verdict=judge(requests, by_length[likely]),
    )

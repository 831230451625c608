"""The plan of a run: opens the job as the run would, sizes it up, simulates it, judges it. Knows no terminal."""

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
from pagedbatch.tools.plan.advice import Advice, advise, best_block_size, blocks_wanted
from pagedbatch.tools.plan.forecast import Forecast, ample, by_block_size, forecast
from pagedbatch.tools.plan.outcomes import suppositions
from pagedbatch.tools.plan.sizes import Sizes, size_up
from pagedbatch.tools.plan.survey import RowsFound, read_rows
from pagedbatch.tools.plan.verdict import Verdict, judge
from pagedbatch.wording import plural


@dataclass(frozen=True, slots=True)
class Outlook:
    """The simulated part of a plan.

    `forecasts` go from the shortest outputs to the longest, a single one where all lengths are known; `likely` is the
    one to count on. `by_block_size` and `advice` suppose memory enough for all.
    """

    forecasts: list[Forecast]
    likely: Forecast
    by_block_size: list[Forecast]
    advice: Advice
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run would need. `outlook` is None where no row can run."""

    settings: dict[str, dict[str, Any]]
    rows: RowsFound
    sizes: Sizes
    outlook: Outlook | None

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it: everything but the prompts."""
        rows = {
            "total": self.rows.num_rows,
            "ok": self.rows.num_ok,
            "error": self.rows.num_refused,
            "first_errors": self.rows.refused,
            "truncated": self.rows.num_truncated,
            "simulated": len(self.rows.first),
        }
        prompts = None if self.rows.prompts is None else asdict(self.rows.prompts)
        outlook = {} if self.outlook is None else asdict(self.outlook)
        return {
            "settings": self.settings,
            "versions": versions(),
            "rows": rows,
            "prompts": prompts,
            "sizes": asdict(self.sizes) | {"pool_bytes": self.sizes.pool_bytes, "fits": self.sizes.fits},
            **outlook,
        }


def make_plan(
    settings: RunSettings,
    *,
    expect_tokens: int | None,
    simulated_rows: int | None,
    notice: Callable[[str], None],
    tell: Callable[[str], None],
) -> Plan:
    """Plans a run of `settings` in one process on this machine. Its output is not looked at.

    Args:
        expect_tokens: the mean length of outputs that may end by themselves.
        simulated_rows: so many of the first rows are simulated; None: as many as take seconds.
        notice: takes a line that a run would print too.
        tell: takes a word about progress now and then.

    Raises:
        UsageError: a run would not start.
    """
    go_offline_if_needed(settings.input, settings.model)
    tell("opening the input and the model's config")
    if settings.uses_workers:
        notice("planned for one process: each worker would have a pool of its own, and its share of the rows")
    # A strict run ends at broken rows; its plan names them.
    settings = replace(settings, strict=False)
    given = open_input(settings, notice)
    with closing(open_job(settings, given, notice)) as opened:
        sizes = size_up(settings, opened.text.defaults)
        config = engine_config(settings, opened.text.defaults, sizes.num_blocks, sizes.num_swap_blocks)
        rows = read_rows(opened, config, simulated_rows, tell)
    described = describe_settings(
        settings,
        opened.text.params,
        opened.text.defaults.generation.values,
        used={"num_blocks": sizes.num_blocks, "device": sizes.device, "dtype": sizes.dtype},
    )
    if not rows.first:
        return Plan(described, rows, sizes, None)
    return Plan(described, rows, sizes, _look_ahead(rows.first, config, sizes, expect_tokens, tell))


def _look_ahead(
    requests: list[Request], config: EngineConfig, sizes: Sizes, expect_tokens: int | None, tell: Callable[[str], None]
) -> Outlook:
    supposed = suppositions(requests, config.block_size, expect_tokens)
    forecasts = []
    for supposition in supposed:
        tell(f"simulating {plural(len(requests), 'row')}, outputs: {supposition.name}")
        forecasts.append(forecast(requests, supposition, config, sizes.block_bytes))
    likely = next(i for i, each in enumerate(supposed) if each.is_likely)
    tell("simulating other block sizes")
    by_size = by_block_size(requests, supposed[likely], config, sizes.token_bytes)
    widest = max(request.params.width for request in requests)
    if supposed[likely] is supposed[-1]:
        longest = next(each for each in by_size if each.block_size == config.block_size)
    else:
        longest = forecast(requests, supposed[-1], ample(requests, config, config.block_size), sizes.block_bytes)
    block_size = best_block_size(by_size)
    # Where the pool is large enough anyhow, another block size would buy nothing.
    if blocks_wanted(longest, widest) > config.num_blocks and block_size != config.block_size:
        roomy = ample(requests, config, block_size)
        longest = forecast(requests, supposed[-1], roomy, block_size * sizes.token_bytes)
    return Outlook(
        forecasts=forecasts,
        likely=forecasts[likely],
        by_block_size=by_size,
        advice=advise(longest, widest, sizes.token_bytes),
        verdict=judge(requests, forecasts[likely]),
    )

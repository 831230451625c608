"""What a run would hold: one simulated run, and the same with blocks of other sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pagedbatch.config import EngineConfig
from pagedbatch.sequence import Request
from pagedbatch.stats.schema import Contiguous
from pagedbatch.tools.plan.length_assumption import LengthAssumption
from pagedbatch.tools.simulate.simulate import simulate

#: Block sizes that a plan compares, beside the run's own.
BLOCK_SIZES = (8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a run would hold. Figures that OUT.stats.json also has have the same name and meaning here.

    `outputs` names the assumption about their lengths. `block_size` and `num_blocks` are those of the pool.
    """

    outputs: str
    mean_output_tokens: float
    block_size: int
    num_blocks: int
    peak_live_blocks: int
    mean_live_blocks: float
    peak_running_sequences: int
    mean_running_sequences: float
    peak_running_rows: int
    mean_running_rows: float
    sharing_saving: float | None
    kv_used: float | None
    prefix_hits: float
    preemptions: int
    contiguous: Contiguous

    @property
    def slots_per_sequence(self) -> float:
        """Token slots of live blocks for each running sequence; shared ones count once."""
        running = self.mean_running_sequences
        return self.mean_live_blocks * self.block_size / running if running else 0.0


def forecast(
    requests: Sequence[Request], assumption: LengthAssumption, config: EngineConfig, block_bytes: int
) -> Forecast:
    """Runs the requests through the real scheduler and pool, their outputs as long as assumed."""
    found = simulate(assumption.script(requests), config, block_bytes=block_bytes)
    memory = found.account.memory()
    cache = memory.prefix_cache
    num_outputs = sum(request.params.n for request in requests)
    return Forecast(
        outputs=assumption.name,
        mean_output_tokens=round(found.output_tokens / num_outputs, 2),
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        peak_live_blocks=memory.peak_live_blocks,
        mean_live_blocks=memory.mean_live_blocks,
        peak_running_sequences=memory.peak_running_sequences,
        mean_running_sequences=memory.mean_running_sequences,
        peak_running_rows=found.peak_groups,
        mean_running_rows=round(found.mean_groups, 6),
        sharing_saving=memory.sharing_saving,
        kv_used=memory.kv_used,
        prefix_hits=round(cache.hit_tokens / cache.queried_tokens, 6) if cache.queried_tokens else 0.0,
        preemptions=memory.preemptions.swap + memory.preemptions.recompute,
        contiguous=memory.contiguous,
    )


def unlimited(requests: Sequence[Request], config: EngineConfig, block_size: int) -> EngineConfig:
    """The same engine with blocks of another size, and enough of them that no request ever waits for one."""
    longest = max(request.max_stored_tokens for request in requests)
    width = max(config.max_num_seqs, *(request.params.width for request in requests))
    num_blocks = width * (-(-longest // block_size) + 1)
    return replace(config, block_size=block_size, num_blocks=num_blocks, num_swap_blocks=0)


def by_block_size(
    requests: Sequence[Request], assumption: LengthAssumption, config: EngineConfig, token_bytes: int
) -> list[Forecast]:
    """The run with blocks of each size, in unlimited memory."""
    sizes = sorted({*BLOCK_SIZES, config.block_size})
    return [forecast(requests, assumption, unlimited(requests, config, size), size * token_bytes) for size in sizes]

"""The account of a real engine over the fake runner, against a recount of the block tables that the runner got."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import mean

import pytest
from fake_runner import FakeRunner

from pagedbatch.config import EngineConfig
from pagedbatch.engine.engine import Engine
from pagedbatch.params import GenerationParams
from pagedbatch.sequence import Request
from pagedbatch.stats.memory import MemoryAccount
from pagedbatch.step import ModelRunnerOutput, SchedulerOutput

BLOCK_SIZE = 16


@dataclass
class Recount:
    """A runner that counts blocks, while the step runs, from the tables of the sequences in it."""

    inner: FakeRunner
    live: list[int] = field(default_factory=list)
    logical: list[int] = field(default_factory=list)
    filled: list[int] = field(default_factory=list)

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        filled: dict[int, int] = {}
        for each in step.sequences:
            seq_len = each.context_len + len(each.token_ids)
            for place, block_id in enumerate(each.block_table):
                slots = min(BLOCK_SIZE, seq_len - place * BLOCK_SIZE)
                filled[block_id] = max(filled.get(block_id, 0), slots)
        self.live.append(len(filled))
        self.logical.append(sum(len(each.block_table) for each in step.sequences))
        self.filled.append(sum(filled.values()))
        return self.inner.execute(step)


def run(prompts: list[int], params: GenerationParams, num_blocks: int = 400) -> tuple[MemoryAccount, Recount]:
    """Rows with prompts of these lengths, all distinct, none preempted: every running sequence is in every step."""
    runner = Recount(FakeRunner(num_blocks, BLOCK_SIZE))
    config = EngineConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE, check_invariants=True)
    engine = Engine(config, runner)
    account = MemoryAccount(num_blocks=num_blocks, block_size=BLOCK_SIZE, block_bytes=1)
    for row, length in enumerate(prompts):
        engine.add(Request(row, [1000 * row + i for i in range(length)], params, rng_key=row))
    while engine.has_unfinished:
        step = engine.step()
        assert step.snapshot is not None
        for output in step.finished:
            account.row_finished(output, params, config.max_model_len)
        account.observe(step.snapshot)
    account.close(engine.pool_counts())
    return account, runner


def test_eight_samples_of_sixty_four_tokens_hold_the_prompt_once() -> None:
    """Step 1 holds the prompt's 4 blocks; steps 2 to 16 hold them and 8 tails, of 40 that tables name."""
    account, _ = run([64], GenerationParams(n=8, temperature=1.0, max_tokens=16))
    memory = account.memory()
    assert memory.peak_shared_blocks == 4
    assert memory.peak_live_blocks == 12
    assert memory.sharing_saving == pytest.approx((0 + 15 * (1 - 12 / 40)) / 16, abs=1e-6)
    assert memory.cow_copies == 0
    assert memory.final_live_blocks == 0
    assert memory.contiguous.oracle.replayed == 8


@pytest.mark.parametrize(
    "params",
    [
        GenerationParams(max_tokens=40),
        GenerationParams(n=4, temperature=1.0, max_tokens=40),
        GenerationParams(num_beams=4, n=2, max_tokens=40),
    ],
    ids=["greedy", "samples", "beams"],
)
def test_the_account_equals_a_recount_of_the_tables(params: GenerationParams) -> None:
    account, seen = run([1, 15, 16, 17, 33, 64], params)
    memory = account.memory()
    saving = [1 - live / logical for live, logical in zip(seen.live, seen.logical, strict=True)]
    used = [filled / (live * BLOCK_SIZE) for filled, live in zip(seen.filled, seen.live, strict=True)]
    assert memory.mean_live_blocks == pytest.approx(mean(seen.live), abs=1e-6)
    assert memory.mean_logical_blocks == pytest.approx(mean(seen.logical), abs=1e-6)
    assert memory.peak_live_blocks == max(seen.live)
    assert memory.sharing_saving == pytest.approx(mean(saving), abs=1e-6)
    assert memory.kv_used == pytest.approx(mean(used), abs=1e-6)
    assert (memory.sharing_saving > 0) == (params.width > 1)
    assert memory.final_live_blocks == 0
    for point in account.timeline():
        assert point.private + point.shared + point.cached + point.free == 400

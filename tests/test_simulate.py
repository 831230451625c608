"""The simulation: lengths in, and an account that is the paper's on the paper's lengths."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

from pagedbatch.config import EngineConfig
from pagedbatch.tools.simulate.simulate import Simulated, simulate
from pagedbatch.tools.simulate.trace import RequestLengths, SampleLengths, log_normal, script_trace, truncate

ALPACA = (19.31, 58.45, 1.0)
SHAREGPT = (161.31, 337.99, 0.65)


def run(
    requests: Any, *, n: int = 1, independent: bool = False, max_tokens: int | None = None, **settings: Any
) -> Simulated:
    config = EngineConfig(
        **{"num_blocks": 10_000, "max_model_len": 2048, "prefix_cache": False, "check_invariants": False, **settings}
    )
    scripted = script_trace(
        requests, config.max_model_len, samples=SampleLengths(n, independent), max_tokens=max_tokens
    )
    return simulate(scripted, config, block_bytes=100)


def drawn(means: tuple[float, float, float], count: int) -> list[RequestLengths]:
    return list(islice(log_normal(*means, seed=0), count))


def test_every_output_has_its_length() -> None:
    requests = [RequestLengths(5, 3), RequestLengths(40, 1), RequestLengths(16, 20)]
    found = run(requests, n=2, max_tokens=20, num_blocks=50, block_size=4, check_invariants=True)
    assert (found.num_ok, found.num_error, found.first_error, found.num_cut) == (3, 0, None, 0)
    assert found.prompt_tokens == 5 + 40 + 16
    assert found.output_tokens == 2 * (3 + 1 + 20)
    assert found.account.memory().final_live_blocks == 0
    assert found.account.lengths().output.max == 20


def test_saving_by_hand() -> None:
    """A prompt of two whole blocks and two samples of two tokens: three steps' tables are prompt, then two tails."""
    memory = run([RequestLengths(8, 3)], n=2, max_tokens=3, num_blocks=20, block_size=4).account.memory()
    # Logical 2, then 3 + 3 twice; live 2, then 4 twice.
    assert memory.sharing_saving == pytest.approx((0 + 1 / 3 + 1 / 3) / 3, abs=1e-6)
    assert memory.peak_live_blocks == 4
    assert memory.cow_copies == 0


@pytest.mark.parametrize(("n", "paper"), [(2, 0.0609), (4, 0.0853), (6, 0.0979)])
def test_alpacas_parallel_sampling_saves_what_the_paper_says(n: int, paper: float) -> None:
    """PagedAttention (arXiv 2309.06180), section 6.3; the means are the paper's, the spread is ours."""
    memory = run(drawn(ALPACA, 1000), n=n, max_num_seqs=64).account.memory()
    assert memory.sharing_saving == pytest.approx(paper, abs=0.01)


@pytest.mark.parametrize(("n", "count"), [(2, 600), (6, 300)])
def test_sharegpts_parallel_sampling_saves_what_the_paper_says(n: int, count: int) -> None:
    """So many requests that those left over at the end, the long ones, hardly count."""
    memory = run(drawn(SHAREGPT, count), n=n, max_num_seqs=64).account.memory()
    assert 0.162 <= memory.sharing_saving <= 0.305
    assert memory.kv_used >= 0.96


def test_contiguous_schemes_stand_in_the_papers_order() -> None:
    memory = run(drawn(SHAREGPT, 250), max_num_seqs=64).account.memory()
    used = [*(use.used for use in memory.contiguous.schemes().values()), memory.kv_used]
    assert used == sorted(used)
    assert used[3] >= 0.96


def test_samples_that_end_by_themselves_share_less() -> None:
    requests = drawn(ALPACA, 300)
    together, apart = (run(requests, n=6, independent=independent, max_num_seqs=64) for independent in (False, True))
    assert apart.account.memory().sharing_saving < together.account.memory().sharing_saving - 0.02
    assert run(requests, n=6, independent=True, max_num_seqs=64).output_tokens == apart.output_tokens


def test_a_prefix_in_common_is_found_in_the_pool() -> None:
    requests = [RequestLengths(40, 4, prefix=1, prefix_tokens=33)] * 6 + [RequestLengths(40, 4)] * 2
    memory = run(requests, prefix_cache=True, block_size=8, max_num_seqs=4).account.memory()
    assert memory.prefix_cache.hit_tokens == 5 * 32


def test_a_pool_too_small_for_a_request_fails_that_one() -> None:
    found = run([RequestLengths(10, 5), RequestLengths(500, 5)], max_tokens=5, num_blocks=8, block_size=16)
    assert (found.num_ok, found.num_error) == (1, 1)
    assert found.first_error is not None
    assert found.first_error.startswith("request 1: ")


def test_lengths_are_cut_to_the_context() -> None:
    requests = [RequestLengths(100, 100), RequestLengths(10, 100), RequestLengths(5, 2)]
    cut = [truncate(request, 50) for request in requests]
    assert run(requests, max_model_len=50).num_cut == 2
    assert [(one.prompt_tokens, one.output_tokens) for one in cut] == [(49, 1), (10, 40), (5, 2)]

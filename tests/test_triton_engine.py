"""The whole engine through the Triton kernels, in the interpreter: the same outputs as through the torch backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import run_engine
from models import rand_model
from pagedbatch_kernels import triton_backend
from pagedbatch_kernels.prefix_groups import PrefixCosts

from pagedbatch.params import GenerationParams
from pagedbatch.sequence import Request

KINDS = [
    GenerationParams(max_tokens=8, ignore_eos=True),
    GenerationParams(n=4, temperature=1.0, top_p=0.9, max_tokens=8, ignore_eos=True),
    GenerationParams(num_beams=4, n=4, max_tokens=8),
]
#: Sharing pays always, as far as these say.
FREE = PrefixCosts(queries_per_kv=2, plain_tile=1, shared_tile=64, reread=1.0, merge=0.0, launch=0.0)


@pytest.fixture(scope="module")
def one_layer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer, as the interpreter takes milliseconds a program."""
    path = tmp_path_factory.mktemp("one_layer")
    rand_model(path, layers=1)
    return path


def requests() -> list[Request]:
    """Greedy, samples and beams, whose prompts end within, at and after a block."""
    lengths = (12, 14, 8)
    return [
        Request(row, [1, *range(20, 20 + length)], params, rng_key=row)
        for row, (length, params) in enumerate(zip(lengths, KINDS, strict=True))
    ]


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_equal_outputs(one_layer_path: Path, preemption: Any) -> None:
    settings: dict[str, Any] = {"num_blocks": 11, "block_size": 8, "num_swap_blocks": 40, "preemption": preemption}
    expected = run_engine(one_layer_path, requests(), attention="torch", **settings)
    found = run_engine(one_layer_path, requests(), attention="triton", **settings)
    assert found.token_ids() == expected.token_ids()
    assert found.counters == expected.counters
    assert found.counters.preemptions_swap + found.counters.preemptions_recompute > 0
    assert found.counters.cow_copies > 0


def test_equal_outputs_through_shared_prefixes(one_layer_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = []
    plain = triton_backend.paged_attention

    def spy(query: Any, layer_cache: Any, batch: Any, **options: Any) -> Any:
        shared.append(batch.shared_prefixes is not None)
        return plain(query, layer_cache, batch, **options)

    monkeypatch.setattr(triton_backend, "paged_attention", spy)
    monkeypatch.setattr(triton_backend, "prefix_costs", lambda attention, device: FREE)
    found = run_engine(one_layer_path, requests(), block_size=8, attention="triton")
    assert any(shared)
    assert found.token_ids() == run_engine(one_layer_path, requests(), block_size=8, attention="torch").token_ids()

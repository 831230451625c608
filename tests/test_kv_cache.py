"""The size of the pool, and what is said when there is no memory for it."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pagedbatch_kernels import reference
from pagedbatch_kernels.interface import CacheShape

from pagedbatch.errors import UsageError
from pagedbatch.model import kv_cache
from pagedbatch.model.kv_cache import KVCache, _container_memory, choose_num_blocks
from pagedbatch.step import BlockCopy

CPU = torch.device("cpu")
SHAPE = CacheShape(num_layers=2, block_size=4, num_kv_heads=2, head_size=8)


def choose(**asked: Any) -> int:
    return choose_num_blocks(1000, CPU, **{"num_blocks": None, "kv_memory": None, "max_useful": 10**9} | asked)


def test_pool_as_asked() -> None:
    assert choose(num_blocks=7, max_useful=3) == 7
    assert choose(kv_memory=4999, max_useful=3) == 4


def test_pool_from_a_share_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "free_memory", lambda device: 100_000)
    assert choose() == 100_000 * kv_cache.FREE_MEMORY_SHARE["cpu"] // 1000
    assert choose(max_useful=12) == 12


def test_a_container_has_less_than_its_machine(tmp_path: Path) -> None:
    assert _container_memory(tmp_path) == math.inf
    for name, content in {"max": "1000", "current": "700", "stat": "anon 600\ninactive_file 90\n"}.items():
        (tmp_path / f"memory.{name}").write_text(content)
    assert _container_memory(tmp_path) == 390
    (tmp_path / "memory.max").write_text("max\n")
    assert _container_memory(tmp_path) == math.inf


def test_no_room_for_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="--kv-memory 999 bytes"):
        choose(kv_memory=999)
    monkeypatch.setattr(kv_cache, "free_memory", lambda device: 10)
    with pytest.raises(UsageError, match="--num-blocks"):
        choose()


@pytest.mark.parametrize(("full", "flag"), [("device", "--num-blocks"), ("host", "--swap-space")])
def test_out_of_memory_names_the_flag(full: str, flag: str) -> None:
    calls = []

    def allocate_cache(shape: CacheShape, num_blocks: int, *_: object, is_spare: bool) -> torch.Tensor:
        calls.append((num_blocks, is_spare))
        if len(calls) == {"device": 1, "host": 2}[full]:
            raise RuntimeError("can't allocate memory\nwith a long story")
        return torch.empty(0)

    backend: Any = SimpleNamespace(allocate_cache=allocate_cache)
    with pytest.raises(UsageError, match=flag) as caught:
        KVCache(backend, SHAPE, 1000, 500, torch.float32, CPU)
    assert calls == [(1000, False), (500, True)][: len(calls)]
    assert "\n" not in str(caught.value)
    assert "GiB" in str(caught.value)


def test_a_pool_that_the_machine_would_only_promise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "free_memory", lambda device: 1000)
    backend: Any = reference
    with pytest.raises(UsageError, match="--kv-memory"):
        KVCache(backend, SHAPE, 1000, 0, torch.float32, CPU)


def test_apply_swaps_out_then_in_then_copies() -> None:
    """A block that is swapped out may be filled from the host and copied from in the same step."""
    backend: Any = reference
    cache = KVCache(backend, SHAPE, 4, 4, torch.float32, CPU)
    cache.device_cache.copy_(torch.arange(4.0).view(1, 1, 4, 1, 1, 1).expand_as(cache.device_cache))
    cache.apply([BlockCopy(0, 3)], [], [])
    cache.device_cache[:, :, 0] = 9.0
    cache.apply([BlockCopy(1, 2)], [BlockCopy(3, 1)], [BlockCopy(1, 2)])
    assert [set(cache.device_cache[:, :, i].flatten().tolist()) for i in range(4)] == [{9.0}, {0.0}, {0.0}, {3.0}]

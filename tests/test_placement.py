"""Where workers go on a cluster: what each takes, so that all of them fit and nothing beside them waits."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedbatch.errors import UsageError
from pagedbatch.run.workers.placement import place_workers
from pagedbatch.run.workers.worker_engine import ResourceShare
from pagedbatch.settings import RunSettings, merge


def settings(**given: Any) -> RunSettings:
    return merge({"input": "in", "model": "m", "output": "out", **given}, {})


def test_by_default_there_is_a_worker_a_gpu() -> None:
    placement = place_workers(settings(), [(16.0, 4), (16.0, 0), (8.0, 2)])
    assert (placement.num_workers, placement.num_gpus, placement.share) == (6, 1, ResourceShare(1, 1.0))
    assert placement.num_cpus < 0.1, "the CPUs of a machine are never too few for its GPUs"


def test_without_gpus_there_is_a_worker_a_machine_with_all_its_cpus() -> None:
    placement = place_workers(settings(), [(8.0, 0), (8.0, 0)])
    assert (placement.num_workers, placement.num_cpus, placement.share) == (2, 8, ResourceShare(8, 1.0))
    assert place_workers(settings(device="cpu"), [(8.0, 4)]).num_gpus == 0
    assert place_workers(settings(), [(0.0, 0), (8.0, 0)]).num_workers == 1, "a head without CPUs is no place"


@pytest.mark.parametrize(
    ("workers", "nodes", "num_cpus", "share"),
    [
        (2, [(2.0, 0)], 1, ResourceShare(1, 1 / 2)),
        (4, [(2.0, 0)], 1 / 2, ResourceShare(1, 1 / 4)),  # parts of a CPU where there are more workers than CPUs
        (3, [(8.0, 0), (4.0, 0)], 4, ResourceShare(4, 1 / 2)),
        (1, [(8.0, 0), (4.0, 0)], 8, ResourceShare(8, 1.0)),
    ],
)
def test_cpu_workers_share_alike(
    workers: int, nodes: list[tuple[float, int]], num_cpus: float, share: ResourceShare
) -> None:
    placement = place_workers(settings(workers=workers), nodes)
    assert (placement.num_workers, placement.num_cpus, placement.share) == (workers, num_cpus, share)


@given(st.integers(1, 12), st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any))
def test_all_workers_fit_at_the_same_time(workers: int, cpus: list[int]) -> None:
    placement = place_workers(settings(workers=workers), [(float(count), 0) for count in cpus])
    assert sum(int(count / placement.num_cpus) for count in cpus) >= workers
    assert placement.share.num_threads <= max(1, placement.num_cpus)


@pytest.mark.parametrize(
    ("given", "nodes", "message"),
    [
        ({"workers": 3}, [(8.0, 2)], "--workers 3: the cluster has 2 GPUs, and each worker takes one"),
        ({"device": "cuda"}, [(8.0, 0)], "--device cuda: the cluster has no GPU"),
        ({"workers": 1}, [(0.0, 0)], "the cluster has no CPU for a worker"),
        ({}, [(0.0, 0)], "the cluster has no CPU for a worker"),
    ],
)
def test_what_a_cluster_does_not_have(given: dict[str, Any], nodes: list[tuple[float, int]], message: str) -> None:
    with pytest.raises(UsageError) as refused:
        place_workers(settings(**given), nodes)
    assert str(refused.value) == message

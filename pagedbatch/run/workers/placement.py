"""How many workers a cluster gets and what each takes, from the CPUs and GPUs of its machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagedbatch.errors import UsageError
from pagedbatch.run.workers.worker_engine import ResourceShare
from pagedbatch.settings import RunSettings


@dataclass(frozen=True, slots=True)
class Placement:
    """The number of workers and what each takes of the cluster: `num_cpus` as Ray counts, `share` in fact.

    The run begins when `num_awaited` of the workers are up.
    """

    num_workers: int
    num_awaited: int
    num_cpus: float
    num_gpus: int
    share: ResourceShare


def place_workers(settings: RunSettings, nodes: Sequence[tuple[float, int]]) -> Placement:
    """Places workers on `nodes`, given as (CPUs, GPUs).

    CPU workers take as many whole CPUs each as fit for all of them, or an equal part of one. What Ray runs beside them
    takes none, so that it never waits for theirs.

    Raises:
        UsageError: there are too few GPUs, or no CPUs.
    """
    num_gpus = sum(gpus for _, gpus in nodes) if settings.device != "cpu" else 0
    if settings.device == "cuda" and not num_gpus:
        raise UsageError("--device cuda: the cluster has no GPU")
    num_workers = settings.workers or num_gpus or sum(cpus > 0 for cpus, _ in nodes)
    if num_gpus:
        if num_gpus < num_workers:
            raise UsageError(f"--workers {num_workers}: the cluster has {num_gpus} GPUs, and each worker takes one")
        # a little of a CPU, so that the GPUs of a node are never out of reach for want of one
        return Placement(num_workers, 1, 0.01, 1, ResourceShare(1, 1.0))
    max_cpus = int(max((cpus for cpus, _ in nodes), default=0))
    for num_cpus in [*range(max_cpus, 0, -1), *(1 / parts for parts in range(2, num_workers + 1))]:
        if sum(int(cpus / num_cpus) for cpus, _ in nodes) >= num_workers:
            per_node = max(int(cpus / num_cpus) for cpus, _ in nodes)
            return Placement(num_workers, 1, num_cpus, 0, ResourceShare(max(1, int(num_cpus)), 1 / per_node))
    raise UsageError("the cluster has no CPU for a worker")

"""How many workers go on a cluster and what each takes of it, from the counts of its machines. Knows no Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagedbatch.errors import UsageError
from pagedbatch.run.workers.setup import Share
from pagedbatch.settings import RunSettings


@dataclass(frozen=True, slots=True)
class Workplaces:
    """How many workers there are and what each takes of the cluster: `num_cpus` is what Ray counts, `share` what is.

    Rows go out when `num_awaited` of the workers are up.
    """

    num_workers: int
    num_awaited: int
    num_cpus: float
    num_gpus: int
    share: Share


def place_workers(settings: RunSettings, nodes: Sequence[tuple[float, int]]) -> Workplaces:
    """Workers for a cluster whose nodes have so many (CPUs, GPUs).

    CPU workers take as many whole CPUs each as all of them can have, or an equal part of one. What runs beside them
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
        return Workplaces(num_workers, 1, 0.01, 1, Share(1, 1.0))
    most = int(max((cpus for cpus, _ in nodes), default=0))
    for num_cpus in [*range(most, 0, -1), *(1 / parts for parts in range(2, num_workers + 1))]:
        if sum(int(cpus / num_cpus) for cpus, _ in nodes) >= num_workers:
            on_a_node = max(int(cpus / num_cpus) for cpus, _ in nodes)
            return Workplaces(num_workers, 1, num_cpus, 0, Share(max(1, int(num_cpus)), 1 / on_a_node))
    raise UsageError("the cluster has no CPU for a worker")

"""The Ray cluster that workers run on: one started on this machine for the run, or a running one."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

import ray
from ray.exceptions import AuthenticationError

from pagedbatch.errors import UsageError
from pagedbatch.run.workers.placement import Placement, place_workers
from pagedbatch.run.workers.ray_temp_dir import ray_temp_dir
from pagedbatch.run.workers.worker_engine import ResourceShare
from pagedbatch.settings import RunSettings
from pagedbatch.wording import first_line

#: Small: only groups of rows and their records pass between the processes.
_OBJECT_STORE_BYTES = 256 << 20
_SECONDS_TO_CONNECT = 10.0


@contextmanager
def open_cluster(settings: RunSettings) -> Iterator[Placement]:
    """Starts Ray for this run alone and stops it at the end, or joins the cluster at `--ray-address`.

    Ray prints its messages to stdout, where data goes: within this block, whatever is printed there is dropped.

    Raises:
        UsageError: there is no such cluster, or it is too small.
    """
    on_sigterm = signal.getsignal(signal.SIGTERM)
    address = settings.ray_address
    opened = _own_cluster(settings) if address is None else _running_cluster(settings, address)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), opened as placement:
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray has replaced it
        yield placement


@contextmanager
def _own_cluster(settings: RunSettings) -> Iterator[Placement]:
    num_workers = settings.workers or 1
    num_gpus = _gpus_here() if settings.device != "cpu" else 0
    if num_gpus and num_gpus < num_workers:
        raise UsageError(f"--workers {num_workers}: this machine has {num_gpus} GPUs, and each worker takes one")
    threads = int(os.environ.get("OMP_NUM_THREADS", 0)) or max(1, len(os.sched_getaffinity(0)) // num_workers)
    # Without a token for this run alone, Ray would leave one in the home folder for later runs.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    # Task events take half a kilobyte per row, for a dashboard that is not started.
    os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
    with ray_temp_dir() as folder:
        try:
            # These CPUs are only tokens: two more than workers, so that nothing that Ray runs beside them waits.
            _init_ray(
                address="local",
                num_cpus=num_workers + 2,
                num_gpus=num_gpus,
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                _temp_dir=str(folder),
            )
            yield Placement(num_workers, num_workers, 1, int(num_gpus > 0), ResourceShare(threads, 1 / num_workers))
        finally:
            ray.shutdown()


@contextmanager
def _running_cluster(settings: RunSettings, address: str) -> Iterator[Placement]:
    if address.startswith("ray://"):
        raise UsageError("--ray-address: the job must run on a machine of the cluster: give auto or HOST:PORT there")
    if address != "auto":
        _check_listening(address)
    try:
        _init_ray(address=address)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError, AuthenticationError) as error:
        token = "or it asks for a token, which RAY_AUTH_MODE=token and RAY_AUTH_TOKEN give"
        raise UsageError(
            f"--ray-address {address}: no Ray cluster answers there, {token}: {first_line(error)}"
        ) from None
    try:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        yield place_workers(settings, [(node.get("CPU", 0.0), int(node.get("GPU", 0))) for node in nodes])
    finally:
        ray.shutdown()


def _check_listening(address: str) -> None:
    """Refuses an address where nothing listens: Ray itself would try for minutes without a message."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _SECONDS_TO_CONNECT).close()
    except (OSError, ValueError) as error:
        raise UsageError(f"--ray-address {address}: no Ray cluster answers there: {first_line(error)}") from None


def _init_ray(**arguments: Any) -> None:
    """`ray.init` without its messages: its C++ code writes its log level to stderr."""
    sys.stderr.flush()
    saved = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        ray.init(log_to_driver=False, logging_level=logging.CRITICAL, **arguments)
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def _gpus_here() -> int:
    import torch

    return torch.cuda.device_count()

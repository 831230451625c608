"""The flow of a run through Ray Data: read -> map_batches over a pool of engines -> finished groups.

What flows is a table of one column, `group`, in which each row is one packed group, so that Ray never splits a group.
Ray gives the groups of a worker that died to its replacement, as often as needed; `Ledger` and `GroupRunner` decide
which row is to blame, and when to give it up.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import ray
import ray.data
from ray.data import DataContext, Datasource
from ray.data.block import BlockMetadata
from ray.data.datasource import ReadTask

from pagedbatch.errors import PagedBatchError, RunError, UsageError
from pagedbatch.outputs import StepSnapshot
from pagedbatch.run.pending_rows import PendingRows
from pagedbatch.run.workers.groups import FinishedGroup, GroupSizes, groups, pack
from pagedbatch.run.workers.ledger import MAX_FAILED_STARTS, Failure, Ledger, Overview, WorkerHistory
from pagedbatch.run.workers.placement import Placement
from pagedbatch.run.workers.worker_engine import ResourceShare, WorkerPlan
from pagedbatch.stats.memory import MemoryAccount
from pagedbatch.wording import named

_COLUMN = "group"
#: Groups on their way to a worker beside those inside it, so that it does not wait for transfers.
_GROUPS_IN_TRANSIT = 2
#: A worker that can't start says so itself.
_MAX_START_SECONDS = 7 * 24 * 3600


class RemoteLedger:
    """The job's access to a `Ledger` in a process on this machine. `handle` is for the workers."""

    def __init__(self) -> None:
        # Each group makes several calls: their events would push those of tasks out of what a cluster keeps.
        options = {"num_cpus": 0, "label_selector": _here(), "enable_task_events": False}
        self.handle: Any = ray.remote(**options)(Ledger).remote()

    def overview(self) -> Overview:
        overview: Overview = ray.get(self.handle.overview.remote())
        return overview

    def histories(self) -> dict[str, WorkerHistory]:
        histories: dict[str, WorkerHistory] = ray.get(self.handle.histories.remote())
        return histories


def finished_groups(
    rows: PendingRows, sizes: GroupSizes, plan: WorkerPlan, placement: Placement, ledger: RemoteLedger
) -> Iterator[FinishedGroup]:
    """Starts the workers and yields each group when it is finished, in no particular order.

    Raises:
        RayError: a worker ended the run, and the ledger may know why; or Ray failed.
    """
    if not rows.num_pending:
        return
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.execution_no_progress_timeout_s = -1  # a group takes as long as it takes
    # All begin at the same time, so that none takes the others' share of a short input.
    context.wait_for_min_actors_s = _MAX_START_SECONDS if placement.num_awaited > 1 else -1
    context.target_max_block_size = 1  # a block is one group, and is passed on at once
    with suppress(ImportError):  # imports a private module of Ray, which another version may lack
        from pagedbatch.run.workers.ray_metadata_leak import ClearBlockStats

        context.custom_execution_callback_classes = [ClearBlockStats]
    dataset = ray.data.read_datasource(
        _Groups(rows, sizes.rows),
        override_num_blocks=1,
        num_cpus=0,
        label_selector=_here(),  # where the input is
    ).map_batches(
        Worker,
        fn_constructor_args=(plan, placement.share, ledger.handle),
        batch_size=None,
        batch_format="pyarrow",
        num_cpus=placement.num_cpus,
        num_gpus=placement.num_gpus or None,
        compute=ray.data.ActorPoolStrategy(
            size=placement.num_workers,
            max_concurrent_calls_per_actor=sizes.groups_in_engine,
            max_tasks_in_flight_per_actor=sizes.groups_in_engine + _GROUPS_IN_TRANSIT,
            enable_true_multi_threading=True,  # a call only waits for the engine, which has a thread of its own
        ),
    )
    for batch in dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1):
        for packed in batch[_COLUMN]:
            yield pickle.loads(packed.as_py())


def _here() -> dict[str, str]:
    """Selects the machine of the job."""
    return {"ray.io/node-id": ray.get_runtime_context().get_node_id()}


class _Groups(Datasource):  # type: ignore[misc]
    """The pending rows of an input. One task reads them in order, no further ahead than Ray Data has room for."""

    def __init__(self, rows: PendingRows, group_size: int) -> None:
        super().__init__()
        self._rows = rows
        self._group_size = group_size

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> list[ReadTask]:
        unknown = BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
        return [ReadTask(self._read, unknown)]

    def _read(self) -> Iterator[pa.Table]:
        for group in groups(self._rows, self._group_size):
            yield _table([pack(group)])


class Worker:
    """An engine in its own process. Ray Data makes it, and calls it from several threads."""

    def __init__(self, plan: WorkerPlan, share: ResourceShare, ledger: Any) -> None:
        here = ray.get_runtime_context()
        self._name = here.get_actor_id()
        self._ledger = ledger
        starts = ray.get(ledger.enroll.remote(self._name, ray.util.get_node_ip_address()))
        try:
            if starts > MAX_FAILED_STARTS:
                raise RunError(f"a worker died {starts - 1} times without finishing a row")
            engine = plan.open(share)
            self._runner = engine.serve(_RayLedgerClient(self._name, ledger))
            ray.get(ledger.ready.remote(self._name, engine.used()))
        except Exception as error:
            raise self._failed(error) from None

    def __call__(self, batch: pa.Table) -> pa.Table:
        try:
            finished = [self._runner.run(pickle.loads(packed.as_py())) for packed in batch[_COLUMN]]
        except Exception as error:
            raise self._failed(error) from None
        return _table([pack(FinishedGroup(self._name, rows)) for rows in finished])

    def _failed(self, error: Exception) -> Exception:
        """Tells the ledger why the run ends: what comes through Ray is a traceback."""
        message = str(error) if isinstance(error, PagedBatchError) else named(error)
        ray.get(self._ledger.fail.remote(Failure(message, isinstance(error, UsageError))))
        return RuntimeError(message)


@dataclass(frozen=True, slots=True)
class _RayLedgerClient:
    """Calls the ledger from a worker. Reports are sent without waiting; they arrive before later calls."""

    worker: str
    ledger: Any

    def tries(self, rows: Sequence[int]) -> int:
        tries: int = ray.get(self.ledger.tries.remote(rows))
        return tries

    def begin(self, rows: Sequence[int]) -> int:
        tries: int = ray.get(self.ledger.begin.remote(self.worker, rows))
        return tries

    def survived(self, rows: Sequence[int]) -> None:
        ray.get(self.ledger.survived.remote(self.worker, rows))

    def settle(self, rows: Sequence[int]) -> None:
        ray.get(self.ledger.settle.remote(self.worker, rows))

    def report(self, snapshot: StepSnapshot | None, account: MemoryAccount | None) -> None:
        packed = None if account is None else pickle.dumps(account, pickle.HIGHEST_PROTOCOL)
        self.ledger.report.remote(self.worker, snapshot, packed)


def _table(packed: list[bytes]) -> pa.Table:
    return pa.table({_COLUMN: pa.array(packed, pa.binary())})

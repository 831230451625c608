"""Runs in workers: what one process writes, whatever is killed on the way.

Some start a Ray of their own, as `--workers` does; those that can share a cluster, as `--ray-address` does.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray_cluster import ray_cluster
from tiny_workers import FATAL, tiny_workers
from workplace import View, Workplace

from pagedbatch.errors import UsageError

pytestmark = [
    pytest.mark.ray,
    # Ray must not be imported before the run has told it how to behave.
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: pip install 'pagedbatch[ray]'"),
    # Of Ray about itself; and a thread of Ray Data that meets the end of Ray, which an interrupt doesn't wait for.
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Exception in thread StreamingExecutor"),
]

MIXED = [
    {
        "id": f"r{i}",
        "prompt": f"{'shared beginning of prompts ' * (i % 2)}{i}",
        **({}, {"n": 4, "temperature": 0.9}, {"num_beams": 4, "n": 2})[i % 3],
    }
    for i in range(120)
]
#: What a row found in the cache depends on its neighbours, and those on the worker: without one all bytes are the same.
SETTINGS = {"max_tokens": 240, "max_num_seqs": 32, "prefix_cache": False, "num_blocks": 200}


@pytest.fixture
def words(tmp_path: Path, rand_model_path: Path) -> Workplace:
    words = Workplace(tmp_path, rand_model_path)
    words.write(MIXED)
    return words


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, rand_model_path: Path) -> bytes:
    """What one process writes for `MIXED`."""
    words = Workplace(tmp_path_factory.mktemp("expected"), rand_model_path)
    words.write(MIXED)
    assert words.run(**SETTINGS).exit_code == 0
    return words.output.read_bytes()


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster whose two CPUs both go to the workers."""
    with ray_cluster(num_cpus=2) as address:
        yield address


def workers_of(process: psutil.Process) -> list[psutil.Process]:
    """The workers on the Ray that `process` started for its run; those of a cluster are not.

    The processes that prepare their rows are forked from them, and have their command too.
    """
    own = (child for child in process.children() if "start --head" not in command_of(child))
    found = [each for child in own for each in child.children(recursive=True) if "MapWorker" in command_of(each)]
    pids = {each.pid for each in found}
    return [each for each in found if each.ppid() not in pids]


def command_of(process: psutil.Process) -> str:
    """Empty where it ended just now, or is a zombie."""
    with suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


def once_rows_are_done(least: int, act: Callable[[], Any]) -> View:
    """A view that acts, once, when so many rows are done."""
    acted: list[int] = []

    def look(rows_done: int) -> None:
        if rows_done >= least and not acted:
            acted.append(rows_done)
            act()

    return View(look)


def test_two_workers_write_what_one_process_writes_though_one_is_killed(words: Workplace, expected: bytes) -> None:
    # At the first answers, which the job may hear of half a second late: rows are long enough that others are left.
    view = once_rows_are_done(1, lambda: workers_of(psutil.Process())[0].kill())
    assert words.run(view, workers=2, **SETTINGS).exit_code == 0
    assert words.output.read_bytes() == expected
    stats = words.stats
    assert stats["rows"] == {"total": 120, "ok": 120, "error": 0, "resumed": 0}
    assert sum(worker["rows"] for worker in stats["workers"]) == 120
    assert sorted(worker["restarts"] for worker in stats["workers"]) == [0, 1]
    assert 0 < sum(worker["rows_again"] for worker in stats["workers"]) < 120
    assert all(worker["rows"] for worker in stats["workers"])
    assert stats["memory"]["num_blocks"] == 2 * 200
    assert stats["memory"]["final_live_blocks"] == 0
    assert stats["throughput"]["output_tokens"] == sum(
        len(output["token_ids"]) for record in words.records() for output in record["outputs"]
    )


def killed_run(words: Workplace) -> None:
    """A run that kills its own process in the middle, and leaves the ids of its workers and all that is theirs."""

    def kill() -> None:
        workers = workers_of(psutil.Process())
        pids = [each.pid for worker in workers for each in (worker, *worker.children(recursive=True))]
        (words.folder / "pids.json").write_text(json.dumps(pids))
        os.kill(os.getpid(), signal.SIGKILL)

    words.run(once_rows_are_done(16, kill), workers=2, **SETTINGS)


def test_a_killed_job_is_resumed_by_two_other_workers(words: Workplace, expected: bytes, cluster: str) -> None:
    job = multiprocessing.get_context("spawn").Process(target=killed_run, args=(words,))
    job.start()
    job.join()
    assert job.exitcode == -signal.SIGKILL
    pids = json.loads((words.folder / "pids.json").read_text())
    workers = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    assert len(pids) == 2 * 3  # two more prepare the rows of each
    assert psutil.wait_procs(workers, timeout=300)[1] == [], "workers outlive their job"
    view = View()
    assert words.run(view, ray_address=cluster, workers=2, **SETTINGS).exit_code == 0
    assert view.notices[0].startswith("resuming: ")
    assert words.output.read_bytes() == expected
    assert 0 < words.stats["rows"]["resumed"] < 120


def test_a_shard_is_answered_on_a_cluster_too(words: Workplace, expected: bytes, cluster: str) -> None:
    """Its rows keep the numbers that they have in the whole input."""
    assert words.run(ray_address=cluster, workers=2, shard="1/2", **SETTINGS).exit_code == 0
    assert words.output.read_bytes().splitlines() == expected.splitlines()[60:]
    assert len(words.stats["workers"]) == 2


def test_rows_that_kill_every_worker_are_errors_and_the_others_go_on(words: Workplace, cluster: str) -> None:
    fatal = {7, 8, 51}
    words.write([{"id": f"r{i}", "prompt": f"row {i}{FATAL if i in fatal else ''}"} for i in range(60)])
    with tiny_workers():
        assert words.run(ray_address=cluster, workers=2, max_tokens=3).exit_code == 3
    records = words.records()
    assert [record["id"] for record in records] == [f"r{i}" for i in range(60)]
    assert {record["index"] for record in records if record["status"] == "error"} == fatal
    assert records[7]["error"] == "line 8: each of the 3 workers that it was given to died while it ran"
    assert sum(worker["restarts"] for worker in words.stats["workers"]) >= 3
    assert sum(worker["rows_again"] for worker in words.stats["workers"]) >= 2 * len(fatal)


def records_of_blocks() -> int:
    """How many of its records of what is through Ray Data holds."""
    from ray.data.block import BlockStats

    return sum(type(each) is BlockStats for each in gc.get_objects())


def test_ray_keeps_nothing_of_the_groups_that_are_through(words: Workplace, cluster: str) -> None:
    """Where this fails with a new Ray, the job's memory grows with its rows: see `forgetting`."""
    words.write([{"prompt": "a"} for _ in range(200)])
    kept: list[int] = []
    view = once_rows_are_done(150, lambda: kept.append(records_of_blocks()))
    with tiny_workers():
        assert words.run(view, ray_address=cluster, workers=2, max_tokens=1, max_num_seqs=4).exit_code == 0
    assert kept[0] < 50  # of two a group, which is one row here


def test_a_worker_that_can_t_start_ends_the_run_with_its_message(words: Workplace, cluster: str) -> None:
    words.write([{"prompt": "a"}])
    with tiny_workers(), pytest.raises(UsageError, match=r"^absent: no such model$"):
        words.run(ray_address=cluster, model="absent")
    assert not words.journal.exists()


def test_an_interrupt_gives_up_what_is_in_the_workers(words: Workplace, capfd: pytest.CaptureFixture[str]) -> None:
    words.write([{"prompt": "a"} for _ in range(20_000)])
    view = once_rows_are_done(1000, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with tiny_workers():
        assert words.run(view, workers=2, max_tokens=3).exit_code == 130
    kept = words.journal.read_bytes().count(b"\n") - 1
    assert 1000 <= kept < 20_000
    assert view.notices[-1].startswith(f"interrupted: {kept} of 20000 rows are finished and kept")
    assert workers_of(psutil.Process()) == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere", "nowhere:x"])
def test_an_address_where_nothing_answers_is_told_at_once(words: Workplace, address: str) -> None:
    with tiny_workers(), pytest.raises(UsageError, match=rf"^--ray-address {address}: no Ray cluster answers there: "):
        words.run(ray_address=address)


def test_without_ray_one_line_says_what_to_install(words: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    words.write([{"prompt": "a"}])
    with tiny_workers(), pytest.raises(UsageError, match=r"pip install 'pagedbatch\[ray\]'"):
        words.run(workers=2)


def test_a_run_in_one_process_loads_no_ray(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "a"}))
    program = """if True:
        import sys
        from tiny_job import SilentView, without_model
        from pagedbatch.run.job import run_job
        from pagedbatch.settings import merge
        with without_model():
            given = {"input": "in.jsonl", "model": "none", "output": "out.jsonl"}
            assert run_job(merge(given, {}), lambda *_: SilentView()).exit_code == 0
        assert "ray" not in sys.modules
    """
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, env={**os.environ, "PYTHONPATH": paths})

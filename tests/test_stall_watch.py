"""Workers that report nothing: one warning per stall, at moments that the test chooses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from log_lines import log_lines
from snapshots import snapshot

from pagedbatch.run.workers.ledger import Overview
from pagedbatch.run.workers.stall_watch import STALL_SECONDS, StallWatch


def overview(step: int = 1, num_ready: int = 2, restarts: int = 0) -> Overview:
    pools = {0: snapshot(step), 1: snapshot(7)} if num_ready else {}
    return Overview(pools, past=[], num_ready=num_ready, restarts=[restarts, 0], first_step_at=None, failure=None)


@pytest.fixture
def notices() -> Iterator[list[str]]:
    with log_lines() as lines:
        yield lines


@pytest.fixture
def stall_watch() -> StallWatch:
    return StallWatch(0.0)


def test_each_stall_is_told_once(stall_watch: StallWatch, notices: list[str]) -> None:
    told = []
    for now, step in [(0, 1), (299, 1), (300, 1), (900, 1), (901, 2), (1200, 2), (1201, 2), (1300, 2)]:
        stall_watch.look(now, overview(step), 10)
        told.append(len(notices))
    assert told == [0, 0, 1, 1, 1, 1, 2, 2]
    assert notices[0].startswith("nothing has come from the workers for 5 min 00 s: if a machine of the cluster is")
    assert "the same command goes on" in notices[0]


@pytest.mark.parametrize("change", [{"step": 2}, {"num_ready": 1}, {"restarts": 1}, {"rows_done": 11}])
def test_whatever_changes_ends_a_stall(stall_watch: StallWatch, notices: list[str], change: dict[str, int]) -> None:
    rows_done = change.pop("rows_done", 10)
    stall_watch.look(0, overview(), 10)
    stall_watch.look(STALL_SECONDS - 1, overview(**change), rows_done)
    stall_watch.look(STALL_SECONDS, overview(**change), rows_done)
    assert notices == []


def test_before_the_first_worker_is_up_it_says_so(stall_watch: StallWatch, notices: list[str]) -> None:
    for now in (0, STALL_SECONDS):
        stall_watch.look(now, overview(num_ready=0), 0)
    assert notices == [
        "no worker is up after 5 min 00 s: the model takes long to load, or the cluster has no room for a worker"
    ]

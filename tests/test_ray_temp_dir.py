"""The folder of a Ray of our own: gone with its run, and at the next start where the run was killed."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagedbatch.errors import UsageError
from pagedbatch.run.workers.ray_temp_dir import ray_temp_dir


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder for temporary files whose name is short enough."""
    with tempfile.TemporaryDirectory(prefix="", dir="/tmp") as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


def test_a_folder_is_there_while_it_is_used(parent: Path) -> None:
    with ray_temp_dir() as folder:
        assert folder.parent == parent
        (folder / "log").write_text("x")
    assert list(parent.iterdir()) == []


def test_what_a_killed_run_left_goes_at_the_next_start_and_what_is_used_stays(parent: Path) -> None:
    child = os.fork()
    if child == 0:
        with ray_temp_dir() as folder:
            (folder / "log").write_text("x")
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    (left,) = parent.iterdir()
    assert (left / "log").exists()
    with ray_temp_dir() as used, ray_temp_dir() as other:
        assert set(parent.iterdir()) == {used, other}
    assert list(parent.iterdir()) == []


def test_somebody_else_s_folders_stay(parent: Path) -> None:
    (parent / "ray").mkdir()
    (parent / "target").mkdir()
    (parent / "pagedbatch-ray-link").symlink_to(parent / "target")
    with ray_temp_dir():
        pass
    assert {path.name for path in parent.iterdir()} == {"ray", "target", "pagedbatch-ray-link"}


def test_a_long_name_gives_way_to_a_short_one(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(parent / ("long" * 10)))
    with ray_temp_dir() as folder:
        assert folder.parent == Path("/tmp")


def test_a_place_where_nothing_can_be_written(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(parent / "no"))
    with pytest.raises(UsageError, match=r"^Ray can't keep its files in .*/no: No such file .* \(TMPDIR chooses\)$"):
        ray_temp_dir().__enter__()

"""The journal and the disk: what is synced when, what a failing disk does, what is read back and what is left."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from journal_files import MANIFEST, fill, finished_rows, record

from pagedbatch.errors import RunError, UsageError
from pagedbatch.output.journal import Journal
from pagedbatch.output.journal_entry import seal, unseal
from pagedbatch.output.paths import finished_name


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Each fsync: the name of what was synced, and its size then; 0 for a folder."""
    found: list[tuple[str, int]] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        found.append((os.path.basename(path), 0 if os.path.isdir(path) else os.fstat(descriptor).st_size))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return found


def test_a_new_journal_is_on_the_disk_before_the_run_begins(tmp_path: Path, synced: list[tuple[str, int]]) -> None:
    path = tmp_path / "j"
    with Journal.open(path, MANIFEST, num_rows=5) as journal:
        assert synced == [("j", path.stat().st_size), (tmp_path.name, 0)]
        journal.append(0, record(0), ok=True)
        synced.clear()
        journal.sync()
        assert synced == [("j", path.stat().st_size)]
    synced.clear()
    with Journal.open(path, MANIFEST, num_rows=5):
        assert synced == [("j", path.stat().st_size), (tmp_path.name, 0)]


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock of journals, which the test sets."""
    found = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: found[0])
    return found


def _wait_for_sync(journal: Journal) -> None:
    if journal._syncing is not None:
        journal._syncing.exception()


def test_rows_are_synced_in_the_background_once_a_second(
    tmp_path: Path, now: list[float], synced: list[tuple[str, int]]
) -> None:
    with Journal.open(tmp_path / "j", MANIFEST, num_rows=5) as journal:
        synced.clear()
        for row, seconds in enumerate([0.99, 1.0, 1.5, 1.99, 2.0]):
            now[0] = seconds
            journal.append(row, record(row), ok=True)
            _wait_for_sync(journal)
            assert len(synced) == [0, 1, 1, 1, 2][row]


def test_rows_are_synced_in_the_background_after_many(
    tmp_path: Path, now: list[float], synced: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert now == [0.0]
    monkeypatch.setattr("pagedbatch.output.journal._SYNC_ROWS", 2)
    with Journal.open(tmp_path / "j", MANIFEST, num_rows=5) as journal:
        synced.clear()
        for row in range(5):
            journal.append(row, record(row), ok=True)
            _wait_for_sync(journal)
        assert len(synced) == 2


def test_a_slow_disk_is_given_one_sync_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no append waits for it."""
    with Journal.open(tmp_path / "j", MANIFEST, num_rows=5) as journal:
        monkeypatch.setattr("pagedbatch.output.journal._SYNC_ROWS", 1)
        started: list[int] = []
        released = threading.Event()

        def fsync(descriptor: int) -> None:
            started.append(descriptor)
            assert released.wait(60)

        monkeypatch.setattr(os, "fsync", fsync)
        for row in range(3):
            journal.append(row, record(row), ok=True)
        assert len(started) <= 1
        released.set()
        _wait_for_sync(journal)
        journal.append(3, record(3), ok=True)
        _wait_for_sync(journal)
        assert len(started) == 2
        journal.sync()
        assert len(started) == 3


@pytest.mark.parametrize("wait", [lambda journal: journal.append(1, record(1), ok=True), Journal.sync])
def test_what_the_background_sync_met_is_raised_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait: Callable[[Journal], None]
) -> None:
    with Journal.open(tmp_path / "j", MANIFEST, num_rows=5) as journal:
        monkeypatch.setattr("pagedbatch.output.journal._SYNC_ROWS", 1)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", _no_space)
            journal.append(0, record(0), ok=True)
            _wait_for_sync(journal)
        with pytest.raises(RunError, match=r"can't write .*j: No space left on device"):
            wait(journal)


def _no_space(*_: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_line_that_does_not_fit_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "j"
    with Journal.open(path, MANIFEST, num_rows=5) as journal:
        journal.append(0, record(0), ok=True)
        before = path.read_bytes()
        real = os.pwrite

        def write_some(descriptor: int, data: bytes, offset: int) -> int:
            monkeypatch.setattr(os, "pwrite", _no_space)
            return real(descriptor, data[:9], offset)

        monkeypatch.setattr(os, "pwrite", write_some)
        with pytest.raises(RunError, match=r"can't write .*j: No space left on device"):
            journal.append(1, record(1), ok=True)
        assert path.read_bytes() == before
        assert (1 in journal, journal.num_finished) == (False, 1)
        monkeypatch.undo()
        journal.append(2, record(2), ok=True)
        assert finished_rows(journal) == [record(0), record(2)]


@pytest.mark.parametrize("size", [10, 4000, 4096, 5000, 20_000, 300_000])
def test_records_of_any_size_are_read_back(tmp_path: Path, size: int) -> None:
    records = [json.dumps({"text": text * size}).encode() for text in "ab"]
    with Journal.open(tmp_path / "j", MANIFEST, num_rows=2) as journal:
        for row in (1, 0):
            journal.append(row, records[row], ok=True)
        assert list(journal.records()) == records


def test_a_line_that_is_damaged_while_the_journal_is_open_is_not_written_out(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with Journal.open(path, MANIFEST, num_rows=5) as journal:
        for row in range(3):
            journal.append(row, record(row), ok=True)
        data = path.read_bytes()
        lines = data.splitlines(keepends=True)
        for damaged in (data.replace(b'"id"', b'"ID"'), b"".join([lines[0], *lines[:0:-1]]), data[:-1]):
            path.write_bytes(damaged)
            with pytest.raises(RunError, match=r"j: the line of row \d is damaged: run again"):
                list(journal.records())


def test_a_journal_holds_the_rows_of_its_shard(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with Journal.open(path, MANIFEST, num_rows=3, first_row=10) as journal:
        journal.append(12, record(12), ok=False)
        journal.append(10, record(10), ok=True)
        assert journal.finished_rows() == bytes([1, 0, 2])
        assert [row in journal for row in (10, 11, 12)] == [True, False, True]
        assert not journal.is_complete
        assert list(journal.records()) == [record(10), record(12)]
    with Journal.open(path, MANIFEST, num_rows=2, first_row=11, retry_errors=True) as journal:
        assert (journal.num_finished, journal.num_retried) == (0, 1)
    with Journal.open(path, MANIFEST, num_rows=2, first_row=9) as journal:
        assert journal.finished_rows() == bytes([0, 1])
        journal.append(9, record(9), ok=True)
        assert journal.is_complete
        assert list(journal.records()) == [record(9), record(10)]


def test_a_temporary_journal_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Journal.temporary(MANIFEST, num_rows=5) as journal:
        journal.append(3, record(3), ok=True)
        journal.append(1, record(1), ok=False)
        assert finished_rows(journal) == [record(1), record(3)]
        assert (journal.num_resumed, journal.num_ok, journal.num_error) == (0, 1, 1)
        assert list(tmp_path.iterdir()) == []
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", _no_space)
            with pytest.raises(RunError, match=r"^can't write the temporary journal: No space"):
                journal.append(0, record(0), ok=True)
        journal.mark_finished()
        journal.remove()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", _no_space)
        with pytest.raises(UsageError, match=r"can't write to .*: No space left on device \(TMPDIR chooses\)"):
            Journal.temporary(MANIFEST, num_rows=5)


def test_a_finished_journal_is_marked_once_and_kept_on_the_disk(tmp_path: Path, synced: list[tuple[str, int]]) -> None:
    path = tmp_path / "j"
    mark = b'{"finished": true, "journal": {"row": -2'
    fill(path, [0, 1, 2, 3, 4])
    for _ in range(2):
        with Journal.open(path, MANIFEST, num_rows=5) as journal:
            synced.clear()
            journal.mark_finished()
        kept = finished_name(path)
        assert not path.exists()
        assert kept.read_bytes().count(mark) == 1
        assert kept.read_bytes().splitlines()[-1].startswith(mark)
        assert synced[-1] == (tmp_path.name, 0)
    with Journal.open(path, MANIFEST, num_rows=5) as journal:
        journal.append(1, record(1), ok=True)
        journal.mark_finished()
        assert ("j", kept.stat().st_size) in synced
    assert kept.read_bytes().count(mark) == 2


def test_a_removed_journal_is_gone_and_unlocked(tmp_path: Path) -> None:
    path = tmp_path / "j"
    num_open = len(os.listdir("/proc/self/fd"))
    journal = Journal.open(path, MANIFEST, num_rows=5)
    journal.append(0, record(0), ok=True)
    journal.remove()
    assert not path.exists()
    assert len(os.listdir("/proc/self/fd")) == num_open
    journal.close()  # again does nothing, also to a journal that has come since
    Journal.open(path, MANIFEST, num_rows=5).append(0, record(0), ok=True)
    journal.close()
    assert path.exists()


def test_a_disk_that_fails_when_the_journal_is_opened_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "j"
    fill(path, [0])
    num_open = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _no_space)
        with pytest.raises(UsageError, match=r"can't write .*j: No space left on device"):
            Journal.open(path, MANIFEST, num_rows=5)
    assert len(os.listdir("/proc/self/fd")) == num_open
    with Journal.open(path, MANIFEST, num_rows=5) as journal:
        assert journal.num_resumed == 1


def test_a_run_that_was_killed_before_its_first_row_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_bytes(MANIFEST.encode())
    with Journal.open(path, MANIFEST, num_rows=5) as journal:
        journal.append(0, record(0), ok=True)
    assert path.read_bytes().startswith(MANIFEST.encode())
    with Journal.open(path, MANIFEST, num_rows=5) as journal:
        assert journal.num_resumed == 1


@pytest.mark.parametrize("restart", [False, True])
def test_a_journal_that_begins_anew_keeps_nothing_of_the_old_one(tmp_path: Path, restart: bool) -> None:
    path = tmp_path / "j"
    fill(path, [0, 1, 2, 3, 4])
    with Journal.open(path, MANIFEST, num_rows=5) as journal:
        journal.mark_finished()
    other = replace(MANIFEST, settings={})
    with Journal.open(path, other, num_rows=5, restart=restart) as journal:
        assert path.read_bytes() == other.encode()
        journal.append(0, record(0), ok=True)
    with Journal.open(path, other, num_rows=5) as journal:
        assert finished_rows(journal) == [record(0)]


def test_an_unfinished_journal_counts_and_not_a_finished_one_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "j"
    fill(path, [0, 1, 2])
    finished_name(path).write_bytes(MANIFEST.encode())
    with Journal.open(path, MANIFEST, num_rows=5) as journal:
        assert journal.num_resumed == 3
        assert finished_name(path).read_bytes() == MANIFEST.encode()


def test_the_first_of_several_damaged_lines_is_named(tmp_path: Path) -> None:
    path = tmp_path / "j"
    lines = fill(path, [0, 1, 2]).splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b"x\n", b"y\n", lines[3]]))
    with pytest.raises(UsageError, match=f"is damaged at byte {len(lines[0])}, with whole records behind it"):
        Journal.open(path, MANIFEST, num_rows=5)


def test_closing_and_marking_again_do_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "j"
    journal = Journal.open(path, MANIFEST, num_rows=5)
    journal.close()
    kept = fill(path, [0])
    monkeypatch.setattr(os, "close", _no_space)
    journal.close()
    monkeypatch.undo()
    assert path.read_bytes() == kept
    with Journal.open(path, MANIFEST, num_rows=5) as journal:
        journal.mark_finished()
        marked = finished_name(path).read_bytes()
        journal.mark_finished()
        assert finished_name(path).read_bytes() == marked
    path.write_bytes(MANIFEST.encode())
    new = Journal.open(path, MANIFEST, num_rows=5)
    new.close()
    assert path.exists(), "only a journal that this run has made is removed"


@pytest.mark.parametrize(
    ("was", "now"), [(b'"row": 1', b'"row": true'), (b'"row": 1', b'"row": 1.0'), (b'"ok": true', b'"ok": 1')]
)
def test_an_entry_of_other_types_is_damaged(was: bytes, now: bytes) -> None:
    line = seal(b'{"a": 0}', row=1, ok=True)
    assert unseal(line) is not None
    assert was in line
    assert unseal(line.replace(was, now)) is None

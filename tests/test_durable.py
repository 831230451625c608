"""Files that survive a kill or a power cut: the order of the system calls that make them so, and the lock."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pagedbatch.errors import RunError, UsageError
from pagedbatch.output.durable import open_locked, replacing, sync_folder, write_at, write_atomically

OLD, NEW = b"old", b"new" * 1000


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "out.jsonl"
    path.write_bytes(OLD)
    return path


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int]]:
    """Each fsync and replace: the name of the file, and its size when the call was made."""
    found: list[tuple[str, str, int]] = []

    def watch(name: str, real: Callable[..., Any]) -> None:
        def called(first: Any, *rest: Any) -> Any:
            path = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else os.fspath(first)
            found.append((name, os.path.basename(path), 0 if os.path.isdir(path) else os.path.getsize(path)))
            return real(first, *rest)

        monkeypatch.setattr(os, name, called)

    watch("fsync", os.fsync)
    watch("replace", os.replace)
    return found


def test_the_bytes_are_on_the_disk_before_the_name_and_the_name_before_it_returns(
    target: Path, calls: list[tuple[str, str, int]]
) -> None:
    """Without the first fsync a power cut can leave an empty file under the name, without the second the old one."""
    write_atomically(target, [NEW[:10], NEW[10:]])
    temporary = "out.jsonl.tmp"
    size = len(NEW)
    assert calls == [("fsync", temporary, size), ("replace", temporary, size), ("fsync", target.parent.name, 0)]
    assert target.read_bytes() == NEW


def test_a_folder_is_synced(tmp_path: Path, calls: list[tuple[str, str, int]]) -> None:
    num_open = len(os.listdir("/proc/self/fd"))
    sync_folder(tmp_path)
    assert calls == [("fsync", tmp_path.name, 0)]
    assert len(os.listdir("/proc/self/fd")) == num_open


@pytest.mark.parametrize("call", ["open", "write", "fsync", "replace"])
def test_a_call_that_fails_leaves_the_old_file_and_nothing_else(
    target: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    num_open = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(RunError) as refused:
            write_atomically(target, [NEW])
    assert str(refused.value) == f"can't write {target}: No space left on device"
    assert target.read_bytes() == OLD
    assert os.listdir(target.parent) == [target.name]
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_an_error_of_the_writer_leaves_the_old_file_and_stays_what_it_is(target: Path) -> None:

    def chunks() -> Iterator[bytes]:
        yield NEW
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        write_atomically(target, chunks())
    assert target.read_bytes() == OLD
    assert os.listdir(target.parent) == [target.name]


def test_an_error_without_words_is_shown_whole(target: Path) -> None:
    with pytest.raises(RunError, match=r"can't write .*out\.jsonl: odd$"), replacing(target):
        raise OSError("odd")


def test_a_temporary_file_that_a_kill_left_is_overwritten(target: Path) -> None:
    target.with_name("out.jsonl.tmp").write_bytes(NEW * 2)
    write_atomically(target, [NEW])
    assert target.read_bytes() == NEW


def test_write_at_writes_all_bytes_although_the_system_takes_a_few(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: real(descriptor, data[:2], offset))
    with target.open("r+b") as file:
        write_at(file.fileno(), b"12345", 1)
    assert target.read_bytes() == b"o12345"


def test_a_lock_is_held_until_its_descriptor_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    descriptor = open_locked(path)
    with pytest.raises(UsageError, match="is in use: another run writes the same output"):
        open_locked(path)
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)
    os.close(open_locked(path))


@pytest.mark.parametrize("happens", [os.unlink, lambda path: os.replace(path.with_name("other"), path)])
def test_a_file_that_went_before_it_was_locked_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, happens: Callable[[Path], None]
) -> None:
    """The run that had it removes it or renames it at its end: a lock on what is gone keeps nobody out."""
    path = tmp_path / "journal"
    path.with_name("other").write_bytes(b"the other one")
    real = os.open

    def open_late(*arguments: Any) -> int:
        monkeypatch.undo()
        descriptor = real(*arguments)
        happens(path)
        return descriptor

    monkeypatch.setattr(os, "open", open_late)
    num_open = len(os.listdir("/proc/self/fd"))
    descriptor = open_locked(path)
    assert os.path.samestat(os.fstat(descriptor), path.stat())
    assert len(os.listdir("/proc/self/fd")) == num_open + 1
    os.close(descriptor)


def test_what_can_not_be_opened_or_locked_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"can't write .*: Is a directory"):
        open_locked(tmp_path)

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", fail)
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(UsageError, match="journal can't be locked: No locks available"):
        open_locked(tmp_path / "journal")
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_files_are_made_with_the_usual_rights(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write_atomically(tmp_path / "out", [NEW])
        os.close(open_locked(tmp_path / "journal"))
        modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    finally:
        os.umask(before)
    assert modes == {"out": 0o666, "journal": 0o666}


def test_each_descriptor_is_closed_once(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second time would close a file that somebody has opened since."""
    closed: list[int] = []
    real = os.close

    def close(descriptor: int) -> None:
        closed.append(descriptor)
        real(descriptor)

    monkeypatch.setattr(os, "close", close)
    write_atomically(target, [NEW])
    gc.collect()
    assert len(closed) == 2, "the file and its folder"

"""The cache of CPU kernels: what is loaded from it, what is not; compilers that hang, talk without end or are odd."""

from __future__ import annotations

import os
import select
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from log_lines import log_lines
from pagedbatch_kernels.cpu import build, compiler, library_cache
from pagedbatch_kernels.cpu.build import BuildError, load_library
from pagedbatch_kernels.cpu.compiler import CompilerError, run_compiler

REAL = shutil.which("c++") or shutil.which("g++")
needs_compiler = pytest.mark.skipif(REAL is None, reason="no C++ compiler here")
#: Makes a library of one function, in no time: the last argument is the file to write.
_SOURCE = 'extern "C" int answer() { return 42; }'
_TINY = f"""for last; do :; done; echo '{_SOURCE}' | {REAL} -shared -fPIC -x c++ - -o "$last\""""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Makes the compiler a shell script."""
    monkeypatch.setattr(build, "_loaded", {})
    monkeypatch.setattr(build, "_failed", {})

    def write(lines: str = _TINY, name: str = "my-c++") -> str:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{lines}\n")
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))
        return str(path)

    return write


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "kernels"
    path.mkdir(mode=0o700)
    return path


def build_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What another process says while it loads the library."""
    monkeypatch.setattr(build, "_loaded", {})
    with log_lines(package="pagedbatch_kernels") as notices:
        assert load_library(folder).answer() == 42
    return notices


@needs_compiler
def test_a_library_is_built_once_and_found_again(
    folder: Path, script: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    using = script()
    assert build_again(folder, monkeypatch) == [f"building the CPU kernels, once: {using} into {folder}"]
    assert build_again(folder, monkeypatch) == []
    (path,) = folder.iterdir()
    assert path == library_cache.find(folder, build.library_stem())
    assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0


@needs_compiler
@pytest.mark.parametrize("spoil", ["cut", "changed", "writable", "linked", "hard to read", "other sources"])
def test_a_library_that_can_not_be_trusted_is_built_anew(
    tmp_path: Path, folder: Path, script: Callable[..., str], monkeypatch: pytest.MonkeyPatch, spoil: str
) -> None:
    script()
    build_again(folder, monkeypatch)
    (path,) = folder.iterdir()
    data = path.read_bytes()
    if spoil in ("cut", "changed"):
        path.unlink()  # this process has it loaded
    if spoil == "cut":
        path.write_bytes(data[:-1])
    elif spoil == "changed":
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif spoil == "writable":
        path.chmod(0o722)
    elif spoil == "linked":
        path.rename(tmp_path / "elsewhere.so")
        path.symlink_to(tmp_path / "elsewhere.so")
    elif spoil == "hard to read":
        path.unlink()
        path.mkdir()
    else:
        path.rename(folder / path.name.replace("cpu-kernels-", "cpu-kernels-0"))
    if spoil == "hard to read":  # nothing can take its place, and nothing is loaded
        with pytest.raises(BuildError, match="Is a directory"):
            build_again(folder, monkeypatch)
        return
    assert len(build_again(folder, monkeypatch)) == 1
    assert build_again(folder, monkeypatch) == []
    assert not path.is_symlink()


@needs_compiler
def test_nothing_is_loaded_from_a_folder_that_others_can_write(
    folder: Path, script: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    using = script()
    build_again(folder, monkeypatch)
    for path, reason in (
        (folder, f"others can write to {folder} (chmod go-w)"),
        (folder.parent, f"others can write to {folder.parent}"),
    ):
        mode = path.stat().st_mode
        path.chmod(0o777)
        assert build_again(folder, monkeypatch) == [
            f"building the CPU kernels for this run alone, as {reason}: {using}"
        ]
        path.chmod(mode)
    assert build_again(folder, monkeypatch) == []
    assert len(list(folder.iterdir())) == 1


@needs_compiler
def test_nothing_is_loaded_from_another_users_folder_or_file(
    folder: Path, script: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script()
    build_again(folder, monkeypatch)
    mine = os.geteuid()
    monkeypatch.setattr("os.geteuid", lambda: mine + 1)
    assert library_cache.find(folder, build.library_stem()) is None
    assert library_cache.why_unsafe(folder) == f"{folder} belongs to another user"
    assert "belongs to another user" in build_again(folder, monkeypatch)[0]


@needs_compiler
def test_a_process_loads_and_builds_once(folder: Path, script: Callable[..., str]) -> None:
    script()
    folder.chmod(0o777)
    with log_lines(package="pagedbatch_kernels") as notices:
        assert load_library(folder) is load_library(folder)
    assert len(notices) == 1


def test_a_compiler_that_hangs_is_given_up_once_with_all_that_it_started(
    tmp_path: Path, folder: Path, script: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "TIME_LIMIT_SECONDS", 2)
    os.mkfifo(tmp_path / "held")
    held = os.open(tmp_path / "held", os.O_RDONLY | os.O_NONBLOCK)
    using = script(f"exec 9> {tmp_path / 'held'}; echo up >&9; sleep 1000 & wait")
    with log_lines(package="pagedbatch_kernels") as notices:
        for _ in range(2):
            with pytest.raises(BuildError, match=rf"{using.replace('+', '.')} was given up after 2 s"):
                load_library(folder)
    assert len(notices) == 1
    assert list(folder.iterdir()) == []
    os.set_blocking(held, True)
    assert os.read(held, 10) in (b"up\n", b"")
    assert select.select([held], [], [], 60)[0]  # nobody holds it any more
    os.close(held)


def test_what_a_compiler_says_without_end_is_not_kept(script: Callable[..., str]) -> None:
    with pytest.raises(CompilerError, match=r"was given up after 0\.3 s"):
        run_compiler([script("yes error")], 0.3)
    with pytest.raises(CompilerError) as failed:
        run_compiler([script("echo first error; head -c 10000000 /dev/zero; exit 1")], 60)
    assert str(failed.value).endswith("failed: first error")
    assert compiler._KEPT_BYTES < 10**6


def test_a_child_that_stays_is_not_waited_for(script: Callable[..., str]) -> None:
    run_compiler([script("sleep 1000 & exit 0")], 60)
    run_compiler([script("exec >&- 2>&-; exit 0")], 60)


@needs_compiler
@pytest.mark.parametrize("arguments", [" -O1 -DX='a b'", ""])
def test_the_compiler_may_have_arguments_and_stand_under_a_path_with_blanks(
    tmp_path: Path, folder: Path, script: Callable[..., str], monkeypatch: pytest.MonkeyPatch, arguments: str
) -> None:
    said = tmp_path / "arguments"
    using = script(f'echo "$1|$2" > {said}; {_TINY}', name="my-c++" if arguments else "my c++")
    monkeypatch.setenv("CXX", using + arguments)
    build_again(folder, monkeypatch)
    assert said.read_text().startswith("-O1|-DX=a b\n" if arguments else "-std")


@pytest.mark.parametrize("cxx", ["", "  ", "nope", "nope -O1", "'unbalanced", "/", "/dev/null"])
def test_a_compiler_that_is_none_is_told_in_words(
    folder: Path, script: Callable[..., str], monkeypatch: pytest.MonkeyPatch, cxx: str
) -> None:
    script()
    monkeypatch.setenv("CXX", cxx)
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(BuildError, match=r"there is no (C\+\+ )?compiler"):
        load_library(folder)


def test_a_file_that_is_no_program_is_told_in_words(folder: Path, script: Callable[..., str]) -> None:
    path = Path(script())
    path.write_bytes(b"\x7fELF nonsense")
    with pytest.raises(BuildError, match=r"my-c\+\+ can't be started: Exec format error"):
        load_library(folder)

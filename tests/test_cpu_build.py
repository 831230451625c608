"""Building the CPU kernel: once, whole or not at all, and what is said where it can't be built."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from log_lines import log_lines
from pagedbatch_kernels.cpu import build, library_cache
from pagedbatch_kernels.cpu.backend import CpuBackend
from pagedbatch_kernels.cpu.sampling import CpuSamplingOps

from pagedbatch.errors import UsageError
from pagedbatch.model import backends
from pagedbatch.model.torch_sampling import TorchSamplingOps

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler here")


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one in place of the user's."""
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: tmp_path / name)
    return tmp_path / "pagedbatch" / "kernels"


def compiler(folder: Path, script: str) -> str:
    """A compiler that is a shell script."""
    path = folder / "my-c++"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@needs_compiler
def test_two_processes_that_build_at_once_both_load(tmp_path: Path) -> None:
    code = (
        "import logging, sys; from pathlib import Path; from pagedbatch_kernels.cpu.build import load_library\n"
        "logging.basicConfig(level=logging.INFO)\n"
        "load_library(Path(sys.argv[1])).pagedbatch_attention"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for process in both:
        _, err = process.communicate()
        assert process.returncode == 0, err
    assert library_cache.find(tmp_path, build.library_stem()) in list(tmp_path.iterdir())
    assert all(path.name.startswith(build.library_stem()) for path in tmp_path.iterdir())
    again = subprocess.run(command, capture_output=True, text=True, check=True)
    assert again.stderr == ""


def test_without_a_compiler_auto_is_torch(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(cache_folder))
    with log_lines() as notices:
        assert backends.choose_backend("auto", CPU) == ("torch", backends.REFERENCE)
    assert notices == [
        "no CPU kernels: there is no C++ compiler (c++, g++, clang++ or what $CXX names): going on with the "
        "torch backend"
    ]
    assert "cpu" not in backends.available_backends()
    with pytest.raises(UsageError, match=r"--attention cpu: there is no C\+\+ compiler .*; use --attention torch"):
        backends.choose_backend("cpu", CPU)
    monkeypatch.setenv("CXX", "nope")
    with pytest.raises(UsageError, match=r"--attention cpu: there is no compiler 'nope', which \$CXX names; use"):
        backends.choose_backend("cpu", CPU)


@pytest.mark.parametrize("attention", ["auto", "torch"])
def test_sampling_without_a_compiler_is_torch_and_told_once(
    cache_folder: Path, monkeypatch: pytest.MonkeyPatch, attention: str
) -> None:
    monkeypatch.setenv("CXX", "nope")
    with log_lines() as notices:
        name, _ = backends.choose_backend(attention, CPU)
        assert isinstance(backends.choose_sampling_ops(attention, name, CPU), TorchSamplingOps)
    assert len(notices) == 1
    assert re.match("no CPU (kernels|sampling kernel): there is no compiler 'nope', which", notices[0])


def test_a_build_that_fails_says_why_in_one_line_and_leaves_nothing(
    cache_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = compiler(tmp_path, "echo 'In file x.h:' >&2; echo 'x.h:1: error: no such flag' >&2; exit 1")
    monkeypatch.setenv("CXX", failing)
    with log_lines() as notices, log_lines(notices, "pagedbatch_kernels"):
        assert backends.choose_backend("auto", CPU)[0] == "torch"
    assert notices == [
        f"building the CPU kernels, once: {failing} into {cache_folder}",
        f"no CPU kernels: {failing} failed: x.h:1: error: no such flag: going on with the torch backend",
    ]
    assert list(cache_folder.iterdir()) == []


def test_a_build_that_makes_no_library_is_told_in_words_and_not_kept(
    cache_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The last argument is the file to write.
    monkeypatch.setenv("CXX", compiler(tmp_path, 'for last; do :; done; echo nonsense > "$last"'))
    with pytest.raises(UsageError, match=r"--attention cpu: .*cpu-kernels-\w+\.so can't be loaded"):
        backends.choose_backend("cpu", CPU)
    assert list(cache_folder.iterdir()) == []


def test_a_cache_folder_that_can_not_be_made_is_told_in_words(
    cache_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path, "exit 0"))
    cache_folder.parent.write_text("a file where the folder should be")
    with pytest.raises(UsageError, match=r"--attention cpu: .*(Not a directory|File exists)"):
        backends.choose_backend("cpu", CPU)


@needs_compiler
def test_auto_on_a_cpu_is_the_native_kernel() -> None:
    assert "cpu" in backends.available_backends()
    name, backend = backends.choose_backend("auto", CPU)
    assert name == "cpu"
    assert isinstance(backend, CpuBackend)


@needs_compiler
def test_a_cpu_samples_natively_whatever_attends() -> None:
    for attention, name in (("auto", "cpu"), ("cpu", "cpu"), ("torch", "torch"), ("triton", "triton")):
        assert isinstance(backends.choose_sampling_ops(attention, name, CPU), CpuSamplingOps)
    assert isinstance(backends.choose_sampling_ops("auto", "triton", torch.device("cuda")), TorchSamplingOps)


def test_the_cpu_kernel_is_refused_for_a_model_elsewhere() -> None:
    with pytest.raises(UsageError, match="--attention cpu: the model runs on cuda"):
        backends.choose_backend("cpu", torch.device("cuda"))

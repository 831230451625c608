"""A kernel that fails changes nothing but the speed: one line, and the torch backend goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from engines import paged_model
from log_lines import log_lines
from pagedbatch_kernels import reference
from pagedbatch_kernels.interface import Backend

from pagedbatch.config import EngineConfig
from pagedbatch.engine.engine import Engine
from pagedbatch.errors import UsageError
from pagedbatch.model import backends
from pagedbatch.model.runner import ModelRunner
from pagedbatch.params import GenerationParams
from pagedbatch.sequence import Request


class Failing:
    """The reference backend, whose `function` raises from its `good_calls + 1`-th call on."""

    def __init__(self, function: str, good_calls: int) -> None:
        self._function = function
        self._good_calls = good_calls

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if name == self._function:
                self._good_calls -= 1
                if self._good_calls < 0:
                    raise RuntimeError("out of resource: shared memory\n  details nobody needs")
            return getattr(reference, name)(*args, **options)

        return call


def answers(path: Path, backend: Backend) -> list[list[int]]:
    """n=3 samples in a pool that forces swapping, so that every function of a backend is called."""
    loaded = paged_model(path)
    runner = ModelRunner.create(loaded, attention="torch", block_size=8, num_blocks=24, swap_space=2**22)
    runner._attention.backend = runner._cache._backend = backend
    engine = Engine(EngineConfig(num_blocks=24, block_size=8, num_swap_blocks=runner.num_swap_blocks), runner)
    params = GenerationParams(n=3, temperature=1.0, max_tokens=30, ignore_eos=True)
    for row in range(3):
        engine.add(Request(row, [1, *range(10, 20 + row)], params, rng_key=row))
    finished = {}
    while engine.has_unfinished:
        finished.update({output.request_id: output for output in engine.step().finished})
    assert engine.scheduler.counters.preemptions_swap > 0
    return [output.token_ids for row in sorted(finished) for output in finished[row].outputs]


@pytest.mark.parametrize("good_calls", [0, 7])
@pytest.mark.parametrize("function", ["write_kv", "paged_attention", "copy_blocks", "swap_blocks"])
def test_a_failing_kernel_falls_back_once(rand_model_path: Path, function: str, good_calls: int) -> None:
    failing = cast(Backend, Failing(function, good_calls if function in ("write_kv", "paged_attention") else 0))
    with log_lines() as notices:
        found = answers(rand_model_path, backends.FallbackBackend("triton", failing))
    assert notices == [
        f"triton kernel {function} failed (out of resource: shared memory): going on with the torch backend"
    ]
    assert found == answers(rand_model_path, backends.REFERENCE)


def test_the_torch_backend_has_nothing_to_fall_back_to() -> None:
    backend = backends.FallbackBackend("torch", backends.REFERENCE)
    with pytest.raises(IndexError):
        backend.copy_blocks(torch.zeros(1, 2, 4, 8, 1, 8), torch.tensor([0]), torch.tensor([99]))


def test_triton_that_is_not_installed_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="--attention triton: triton is not installed; use --attention torch"):
        backends.choose_backend("triton", torch.device("cpu"))


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(UsageError, match="--attention cuda: no such backend here; choose one of auto,"):
        backends.choose_backend("cuda", torch.device("cpu"))

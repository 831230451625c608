"""A GPU works behind the host: what it still has to read must not be written over. Shown without one, by a stream that
does nothing before the host waits for it; steps that only prefill never make it wait."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from fake_runs import VOCABULARY, FakeRun, fake_engine, fake_run, request
from late_stream import DEVICE, LateRunner, LateStream

from pagedbatch.model.transfer import to_device, to_device_packed
from pagedbatch.sequence import Request

POOL = {"num_blocks": 1000, "block_size": 4, "num_swap_blocks": 0}


def late_run(monkeypatch: pytest.MonkeyPatch, requests: list[Request], **settings: Any) -> FakeRun:
    sizes = {name: settings.get(name, size) for name, size in POOL.items()}
    runner = LateRunner(monkeypatch, **sizes, vocab_size=VOCABULARY)
    run = FakeRun(fake_engine(runner=runner, **settings).engine, runner)
    run.add(*requests)
    return run.drain()


def only_prefills(run: FakeRun) -> list[bool]:
    return [not (step.samples or step.beams) for step in run.steps]


def test_a_long_prompt_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [request(0, 90, max_tokens=3), request(1, 33, max_tokens=3)]
    expected = fake_run(requests, max_num_batched_tokens=10)
    found = late_run(monkeypatch, requests, max_num_batched_tokens=10)
    assert only_prefills(found)[:8] == [True] * 8
    assert found.answers() == expected.answers()


def test_samples_and_beams_that_share_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = list(range(100, 142))
    kinds: list[dict[str, Any]] = [{}, {"n": 4}, {"num_beams": 3, "n": 3}]
    requests = [request(row, [*prompt, row], max_tokens=9, ignore_eos=True, **kinds[row % 3]) for row in range(6)]
    settings: dict[str, Any] = {"max_num_batched_tokens": 12}
    expected = fake_run(requests, **settings)
    found = late_run(monkeypatch, requests, **settings)
    assert found.counters.cow_copies > 0
    assert sum(only_prefills(found)) > 1
    assert found.answers() == expected.answers()


def test_groups_that_are_swapped_out_and_in(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[dict[str, Any]] = [{}, {"n": 3}, {"num_beams": 2}]
    requests = [request(row, 50 + row, max_tokens=20, ignore_eos=True, **kinds[row % 3]) for row in range(9)]
    settings: dict[str, Any] = {
        "num_blocks": 36,
        "num_swap_blocks": 60,
        "preemption": "swap",
        "max_num_batched_tokens": 9,
    }
    expected = fake_run(requests, **settings)
    found = late_run(monkeypatch, requests, **settings)
    assert found.counters.preemptions_swap > 2
    assert any(step.swap_in and prefills for step, prefills in zip(found.steps, only_prefills(found), strict=True))
    assert found.answers() == expected.answers()


def test_what_is_sent_is_what_it_was_when_it_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = LateStream()
    stream.install(monkeypatch)
    numbers = np.arange(5)
    sent = []
    for _ in range(4):
        sent.append((numbers.tolist(), to_device(numbers, torch.int64, DEVICE)))
        sent += [(numbers.tolist(), each) for each in to_device_packed([numbers, numbers.reshape(1, 5)], DEVICE)]
        numbers += 10
    stream.wait()
    assert all(each.tolist() == wanted for wanted, each in sent)

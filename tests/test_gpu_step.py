"""Sampling on a GPU waits for the device once a step. Shown without one: tensors on torch's "meta" device hold no
numbers, so that every other look at them raises."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pagedbatch.constraint import AllowedIds, AllowedMask
from pagedbatch.model import transfer
from pagedbatch.model.sampler import Sampler
from pagedbatch.params import GenerationParams
from pagedbatch.step import BeamTask, History, SampleTask, SchedulerOutput

VOCAB_SIZE = 1000
HISTORY = History([5, 6, 7, 5, 6], [7, 5])
SAMPLES = [
    GenerationParams(),
    GenerationParams(temperature=0.7, logprobs=3),
    GenerationParams(temperature=1.0, top_p=0.9),
    GenerationParams(temperature=1.0, top_k=20, min_p=0.1, logprobs=0),
    GenerationParams(min_tokens=9, stop_token_ids=(3,), logit_bias=((4, 1.0),)),
    GenerationParams(
        repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.1, no_repeat_ngram_size=2, temperature=1.0
    ),
]
BEAMS = [GenerationParams(num_beams=3, logprobs=2), GenerationParams(num_beams=2, min_tokens=9)]


def step() -> SchedulerOutput:
    samples = [
        SampleTask(row, params, 1, (0, 1) if row == 1 else (0,), 2, HISTORY if params.reads_history else None)
        for row, params in enumerate(SAMPLES)
    ]
    mask = np.full(-(-VOCAB_SIZE // 32), -1, np.int32)
    samples.append(SampleTask(6, SAMPLES[0], 1, (0,), 2, allowed=AllowedIds(np.array([1, 2]))))
    samples.append(SampleTask(7, SAMPLES[1], 1, (0,), 2, allowed=AllowedMask(mask)))
    beams = [
        BeamTask(range(8, 11), BEAMS[0], [-1.0, -2.0, -3.0], 6, 2),
        BeamTask(range(11, 13), BEAMS[1], [-1.0, -2.0], 4, 2),
    ]
    return SchedulerOutput(
        step=0, sequences=[], samples=samples, beams=beams, copies=[], swap_out=[], swap_in=[], num_tokens=13
    )


def test_the_device_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[int] = []

    def to_host(tensors: list[Tensor]) -> list[Any]:
        fetched.append(len(tensors))
        return [np.ones(tuple(tensor.shape)).tolist() for tensor in tensors]

    monkeypatch.setattr(transfer, "to_host", to_host)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    logits = torch.empty(13, VOCAB_SIZE, device="meta", dtype=torch.bfloat16)
    samples, beams = Sampler(frozenset({2}))(logits, step())
    assert len(fetched) == 1
    assert [len(sample.token_ids) for sample in samples] == [1, 2, 1, 1, 1, 1, 1, 1]
    assert [len(beam.token_ids) for beam in beams] == [6, 4]


def test_what_comes_home_is_what_was_there() -> None:
    tensors = [
        torch.tensor([[1.5, -torch.inf], [3e-38, 0.1]]),
        torch.tensor([2**40, 3]),
        torch.tensor(True),
        torch.tensor([[False], [True]]),
    ]
    assert transfer.to_host(tensors) == [tensor.tolist() for tensor in tensors]
    assert transfer.to_host([]) == []

"""Runs requests through a real engine on a fixture model, and through Hugging Face for comparison."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from pagedbatch.config import EngineConfig
from pagedbatch.engine.engine import Engine
from pagedbatch.model.input_batch import InputBatch
from pagedbatch.model.loader import LoadedModel, load_model
from pagedbatch.model.runner import ModelRunner
from pagedbatch.model.tokenizer import load_tokenizer
from pagedbatch.outputs import EngineCounters, RequestOutput, StepSnapshot
from pagedbatch.params import GenerationParams
from pagedbatch.sequence import Request
from pagedbatch.step import ModelRunnerOutput, SchedulerOutput


@dataclass(frozen=True)
class Run:
    """What a run gave back."""

    outputs: dict[int, RequestOutput]
    snapshots: list[StepSnapshot]

    @property
    def counters(self) -> EngineCounters:
        return self.snapshots[-1].counters

    def token_ids(self) -> dict[int, list[list[int]]]:
        return {row: [output.token_ids for output in result.outputs] for row, result in sorted(self.outputs.items())}


@cache
def paged_model(path: Path, dtype: str = "float32") -> LoadedModel:
    return load_model(str(path), dtype=dtype, device="cpu")


@cache
def hf_model(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@cache
def tokenizer(path: Path) -> Any:
    return load_tokenizer(str(path))


def run_engine(
    path: Path,
    requests: list[Request],
    *,
    num_blocks: int = 2000,
    block_size: int = 16,
    num_swap_blocks: int = 0,
    attention: str = "auto",
    dtype: str = "float32",
    **settings: Any,
) -> Run:
    """Runs to the end with every invariant checked after each step, and all blocks back at the end."""
    loaded = paged_model(path, dtype)
    runner = ModelRunner.create(loaded, attention=attention, num_blocks=num_blocks, block_size=block_size)
    swap = num_swap_blocks * runner.block_bytes
    if swap:
        runner = ModelRunner.create(
            loaded, attention=attention, num_blocks=num_blocks, block_size=block_size, swap_space=swap
        )
    config = EngineConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        num_swap_blocks=runner.num_swap_blocks,
        eos_token_ids=loaded.defaults.eos_token_ids,
        max_model_len=loaded.defaults.max_model_len,
        check_invariants=True,
        **settings,
    )
    engine = Engine(config, runner, lambda ids, skip: str(tokenizer(path).decode(ids, skip_special_tokens=skip)))
    for request in requests:
        engine.add(request)
    outputs, snapshots = {}, []
    while engine.has_unfinished:
        step = engine.step()
        outputs.update({output.request_id: output for output in step.finished})
        snapshots.append(step.snapshot)
    assert engine.pool_counts().live == 0
    assert all(snapshot.counters.failed_steps == 0 for snapshot in snapshots)
    return Run(outputs, snapshots)


def hf_greedy(path: Path, prompt_token_ids: list[int], max_tokens: int, **settings: Any) -> list[int]:
    """Generated ids of `generate`, cut after the first end token."""
    model = hf_model(path)
    ids = torch.tensor([prompt_token_ids])
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, **settings
        )
    return _cut(out[0, len(prompt_token_ids) :].tolist(), model)


def hf_beams(
    path: Path, prompt_token_ids: list[int], params: GenerationParams, **settings: Any
) -> list[tuple[list[int], float]]:
    """(generated ids, score) of each returned beam of `generate`, best first."""
    model = hf_model(path)
    ids = torch.tensor([prompt_token_ids])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=params.max_tokens,
            num_beams=params.num_beams,
            num_return_sequences=params.n,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
            **settings,
        )
    rows = [_cut(row[len(prompt_token_ids) :].tolist(), model) for row in out.sequences]
    return list(zip(rows, out.sequences_scores.tolist(), strict=True))


def _cut(token_ids: list[int], model: Any) -> list[int]:
    """Up to and with the first end token: `generate` pads finished rows, with an end token where pad is 0."""
    eos = model.generation_config.eos_token_id
    ends = {eos} if isinstance(eos, int) else set(eos or ())
    for i, token_id in enumerate(token_ids):
        if token_id in ends:
            return token_ids[: i + 1]
    return token_ids


class RecordingRunner(ModelRunner):
    """Keeps the logits of every draw, by the position that they follow and the last token there."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: dict[tuple[int, tuple[int, ...]], Tensor] = {}
        self._forward_of_step, self._forward = self._forward, self._recorded

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self._step = step
        return super().execute(step)

    def _recorded(self, batch: InputBatch) -> Tensor:
        logits = self._forward_of_step(batch)
        for task, row in zip(self._step.samples, logits, strict=True):
            scheduled = self._step.sequences[task.seq_index]
            length = scheduled.context_len + len(scheduled.token_ids)
            self.seen.setdefault((length, task.sample_indices), row.clone())
        return logits

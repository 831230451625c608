"""A job without a model: the real reader, prompts, engine, journal and finisher around a runner that takes no time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from pagedbatch.config import EngineConfig
from pagedbatch.engine.engine import Engine
from pagedbatch.input.requests import ModelLimits, PromptBuilder
from pagedbatch.run.startup import DeviceSide, TextSide
from pagedbatch.settings import RunSettings
from pagedbatch.step import ModelRunnerOutput, SampleResult, SchedulerOutput

VOCABULARY = 256
MAX_MODEL_LEN = 64


class ByteTokenizer:
    """One byte is one token; there are no special ones."""

    bos_token_id = None
    chat_template = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return bytes(token_ids).decode(errors="replace")


class EchoRunner:
    """Draws a sample's next token from the one before it and its index: `a` gives `b`, or `c` for the second sample."""

    backend_name = "none"
    forward_name = "none"
    block_bytes = 1

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_swap_blocks = 0

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        samples = []
        for task in step.samples:
            last = step.sequences[task.seq_index].token_ids[-1]
            drawn = [97 + (last - 96 + index) % 26 for index in task.sample_indices]
            samples.append(SampleResult(drawn, [-0.5] * len(drawn)))
        return ModelRunnerOutput(samples, [])


class SilentView:
    """A display that shows nothing."""

    def __enter__(self) -> SilentView:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def update(self, *_: object) -> None:
        return None


def text_side(settings: RunSettings, constraint: Any, notice: Callable[[str], None]) -> TextSide:
    tokenizer = ByteTokenizer()
    prompts = PromptBuilder(
        tokenizer,
        ModelLimits(MAX_MODEL_LEN, VOCABULARY),
        model_defaults={},
        run_settings=settings.generation,
        prompt_column=settings.prompt_column,
        prompt_template=settings.prompt_template,
        notice=notice,
    )
    generation = SimpleNamespace(values={})
    defaults: Any = SimpleNamespace(generation=generation, eos_token_ids=frozenset(), max_model_len=MAX_MODEL_LEN)
    return TextSide(tokenizer, defaults, prompts, prompts.resolve_params({}))


def device_side(settings: RunSettings, text: TextSide) -> DeviceSide:
    runner: Any = EchoRunner(settings.num_blocks or 1000)
    config = EngineConfig(
        num_blocks=runner.num_blocks,
        block_size=settings.block_size,
        num_swap_blocks=0,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=MAX_MODEL_LEN,
        prefix_cache=settings.prefix_cache,
    )
    loaded: Any = SimpleNamespace(device="cpu", dtype="none")
    return DeviceSide(loaded, runner, Engine(config, runner, lambda ids, skip: text.tokenizer.decode(ids)))


@contextmanager
def without_model() -> Iterator[pytest.MonkeyPatch]:
    """Within it `run_job` loads no model, whatever its name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pagedbatch.run.open.open_text_side", text_side)
        patch.setattr("pagedbatch.run.job.open_device_side", device_side)
        patch.setattr("pagedbatch.run.job.model_fingerprint", lambda _: "tiny")
        patch.setattr("pagedbatch.run.job.go_offline_if_needed", lambda *_: None)
        yield patch

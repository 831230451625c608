"""A job without a model: the real reader, prompts, engine, journal and finisher around a runner that takes no time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from log_lines import log_lines

from pagedbatch.config import EngineConfig
from pagedbatch.engine.engine import Engine
from pagedbatch.input.requests import ModelLimits, PromptBuilder
from pagedbatch.run.job import JobResult, run_job
from pagedbatch.run.setup import EngineSetup, TokenizerSetup
from pagedbatch.settings import RunSettings, merge
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


NO_DEFAULTS = SimpleNamespace(values={}, left_out=())


def tokenizer_setup(settings: RunSettings, constraint: Any) -> TokenizerSetup:
    tokenizer = ByteTokenizer()
    prompts = PromptBuilder(
        tokenizer,
        ModelLimits(MAX_MODEL_LEN, VOCABULARY),
        model_defaults={},
        run_settings=settings.generation,
        prompt_column=settings.prompt_column,
        prompt_template=settings.prompt_template,
    )
    defaults: Any = SimpleNamespace(generation=NO_DEFAULTS, eos_token_ids=frozenset(), max_model_len=MAX_MODEL_LEN)
    return TokenizerSetup(tokenizer, defaults, prompts, prompts.resolve_params({}))


def engine_setup(settings: RunSettings, setup: TokenizerSetup) -> EngineSetup:
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
    return EngineSetup(loaded, runner, Engine(config, runner, lambda ids, skip: setup.tokenizer.decode(ids)))


@contextmanager
def without_model() -> Iterator[pytest.MonkeyPatch]:
    """Within it `run_job` loads no model, whatever its name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pagedbatch.run.open.set_up_tokenizer", tokenizer_setup)
        patch.setattr("pagedbatch.run.job.set_up_engine", engine_setup)
        patch.setattr("pagedbatch.run.job.model_fingerprint", lambda _: "tiny")
        patch.setattr("pagedbatch.run.job.go_offline_if_needed", lambda *_: None)
        yield patch


ROWS = [{"id": f"r{i}", "prompt": f"row {chr(97 + i)}", **({"n": 2} if i % 3 == 0 else {})} for i in range(10)]
ROWS[7]["prompt"] = ""  # an error row


class JobFolder:
    """A folder with an input, and jobs on it without a model."""

    def __init__(self, path: Path, rows: Sequence[Any] | None = ROWS) -> None:
        """Without `rows`, the input is what lies there."""
        self.path = path
        self.notices: list[str] = []
        if rows is not None:
            self.write(rows)

    def write(self, rows: Sequence[Any]) -> None:
        (self.path / "in.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    def run(
        self, output: str = "out.jsonl", update: Callable[[int], None] = lambda rows_done: None, **given: Any
    ) -> JobResult:
        """`update` is called with the number of rows done."""
        view = SilentView()
        view.update = lambda _, rows_done, __: update(rows_done)  # type: ignore[method-assign]
        defaults = {"input": str(self.path / "in.jsonl"), "model": "none", "max_tokens": 3, "temperature": 1.0}
        settings = merge(
            {**defaults, "output": output if output == "-" else str(self.path / output), "max_num_seqs": 4, **given}, {}
        )
        with without_model(), log_lines(self.notices):
            return run_job(settings, lambda *_: view)

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def stats(self, name: str) -> Any:
        return json.loads(self.read(f"{name}.stats.json"))

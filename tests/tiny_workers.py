"""Workers without a model: the real Ray, pipeline and ledger around engines that take no time. Workers import it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from tiny_job import EchoRunner, engine_setup, tokenizer_setup, without_model

from pagedbatch.errors import UsageError
from pagedbatch.run.open import preparation_of
from pagedbatch.run.workers.worker_engine import ResourceShare, WorkerEngine, WorkerPlan
from pagedbatch.step import ModelRunnerOutput, SchedulerOutput

#: A prompt that holds this kills the process that computes it; one token is one byte.
FATAL = "!"


class FatalRunner(EchoRunner):
    """Dies, as a crash in a kernel or a want of memory would have it, of one token."""

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        if any(ord(FATAL) in sequence.token_ids for sequence in step.sequences):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().execute(step)


class TinyPlan(WorkerPlan):
    """Brings up an engine in no time. A model named `absent` is not there."""

    def open(self, share: ResourceShare) -> WorkerEngine:
        if self.settings.model == "absent":
            raise UsageError("absent: no such model")
        setup = tokenizer_setup(self.settings, self.constraint)
        engine = engine_setup(self.settings, setup)
        engine.engine._runner = FatalRunner(engine.runner.num_blocks)
        preparation = preparation_of(self.settings, setup)
        return WorkerEngine(self, setup, preparation, replace(engine, runner=engine.engine._runner))


@contextmanager
def tiny_workers() -> Iterator[pytest.MonkeyPatch]:
    """Within it workers load no model, whatever its name."""
    with without_model() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))  # workers import this file
        patch.setattr("pagedbatch.run.workers.worker_engine.WorkerPlan", TinyPlan)
        yield patch

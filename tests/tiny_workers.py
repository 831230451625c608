"""Workers without a model: the real Ray, pipeline and ledger around engines that take no time. Workers import it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from tiny_job import EchoRunner, device_side, text_side, without_model

from pagedbatch.errors import UsageError
from pagedbatch.run.open import preparation_of
from pagedbatch.run.workers.setup import EnginePlan, OpenedEngine, Share
from pagedbatch.step import ModelRunnerOutput, SchedulerOutput

#: A prompt that holds this kills the process that computes it; one token is one byte.
FATAL = "!"


class FatalRunner(EchoRunner):
    """Dies, as a crash in a kernel or a want of memory would have it, of one token."""

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        if any(ord(FATAL) in sequence.token_ids for sequence in step.sequences):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().execute(step)


class TinyPlan(EnginePlan):
    """Brings up an engine in no time. A model named `absent` is not there."""

    def open(self, share: Share) -> OpenedEngine:
        if self.settings.model == "absent":
            raise UsageError("absent: no such model")
        text = text_side(self.settings, self.constraint)
        device = device_side(self.settings, text)
        device.engine._runner = FatalRunner(device.runner.num_blocks)
        preparation = preparation_of(self.settings, text)
        return OpenedEngine(self, text, preparation, replace(device, runner=device.engine._runner))


@contextmanager
def tiny_workers() -> Iterator[pytest.MonkeyPatch]:
    """Within it workers load no model, whatever its name."""
    with without_model() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))  # workers import this file
        patch.setattr("pagedbatch.run.workers.setup.EnginePlan", TinyPlan)
        yield patch

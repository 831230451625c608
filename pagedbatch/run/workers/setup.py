"""What a worker needs to know to bring up its engine, and how it does so. Knows no Ray; sent to every worker."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

from pagedbatch.constraints.build import ConstraintSource
from pagedbatch.input.hub import go_offline_if_needed
from pagedbatch.input.preparation.preparation import Preparation
from pagedbatch.output.finished_row import AnswerWriter
from pagedbatch.output.records import RecordWriter
from pagedbatch.run.open import preparation_of
from pagedbatch.run.startup import DeviceSide, TextSide, open_device_side, open_text_side
from pagedbatch.run.workers.group_runner import Book, GroupRunner
from pagedbatch.settings import RunSettings


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """`constraint` is the whole run's. `batch_model` is as in `AnswerWriter`."""

    settings: RunSettings
    constraint: ConstraintSource | None
    batch_model: str | None

    def open(self, share: Share) -> OpenedEngine:
        """Loads tokenizer and weights. To be called before anything else of this process imports torch.

        Raises:
            UsageError: as in one process.
        """
        os.environ["OMP_NUM_THREADS"] = str(share.num_threads)
        go_offline_if_needed(self.settings.model)
        for layer in ("input", "run"):  # the job has logged the same
            logging.getLogger(f"pagedbatch.{layer}").setLevel(logging.CRITICAL)
        text = open_text_side(self.settings, self.constraint)
        preparation = preparation_of(self.settings, text)
        return OpenedEngine(self, text, preparation, open_device_side(self.settings, text, memory_share=share.memory))


@dataclass(frozen=True, slots=True)
class Share:
    """What one worker may take of its machine: threads, and a part of the free memory."""

    num_threads: int
    memory: float


@dataclass(frozen=True, slots=True)
class OpenedEngine:
    """An engine that is up."""

    plan: EnginePlan
    text: TextSide
    preparation: Preparation
    device: DeviceSide

    def used(self) -> dict[str, Any]:
        """What settings that choose by themselves came to."""
        return self.device.used()

    def serve(self, book: Book) -> GroupRunner:
        """Begins to take groups."""
        settings = self.plan.settings
        answers = AnswerWriter(RecordWriter(self.text.tokenizer), self.plan.batch_model)
        return GroupRunner(settings, self.preparation, answers, self.device, book)

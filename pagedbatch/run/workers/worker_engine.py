"""A worker's engine: what the job sends to bring it up, and how the worker does so."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

from pagedbatch.constraints.build import ConstraintSource
from pagedbatch.input.hub import go_offline_if_needed
from pagedbatch.input.preparation.preparation import Preparation
from pagedbatch.output.finished_row import FinishedRowWriter
from pagedbatch.output.records import RecordWriter
from pagedbatch.run.open import preparation_of
from pagedbatch.run.setup import EngineSetup, TokenizerSetup, set_up_engine, set_up_tokenizer
from pagedbatch.run.workers.group_runner import GroupRunner, LedgerClient
from pagedbatch.settings import RunSettings


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """Sent to every worker. `constraint` is the whole run's; `openai_model` as in `FinishedRowWriter`."""

    settings: RunSettings
    constraint: ConstraintSource | None
    openai_model: str | None

    def open(self, share: ResourceShare) -> WorkerEngine:
        """Loads tokenizer and weights. To be called before anything else in the process imports torch.

        Raises:
            UsageError: as for an engine in the job's process.
        """
        os.environ["OMP_NUM_THREADS"] = str(share.num_threads)
        go_offline_if_needed(self.settings.model)
        for layer in ("input", "run"):  # the job has logged the same
            logging.getLogger(f"pagedbatch.{layer}").setLevel(logging.CRITICAL)
        tokenizer_setup = set_up_tokenizer(self.settings, self.constraint)
        preparation = preparation_of(self.settings, tokenizer_setup)
        engine_setup = set_up_engine(self.settings, tokenizer_setup, memory_share=share.memory)
        return WorkerEngine(self, tokenizer_setup, preparation, engine_setup)


@dataclass(frozen=True, slots=True)
class ResourceShare:
    """What one worker may take of its machine: threads, and a fraction of the free memory."""

    num_threads: int
    memory: float


@dataclass(frozen=True, slots=True)
class WorkerEngine:
    """An engine that is up."""

    plan: WorkerPlan
    tokenizer_setup: TokenizerSetup
    preparation: Preparation
    engine_setup: EngineSetup

    def used(self) -> dict[str, Any]:
        """What the `auto` settings came to."""
        return self.engine_setup.used()

    def serve(self, ledger: LedgerClient) -> GroupRunner:
        """Begins to take groups."""
        writer = FinishedRowWriter(RecordWriter(self.tokenizer_setup.tokenizer), self.plan.openai_model)
        return GroupRunner(self.plan.settings, self.preparation, writer, self.engine_setup, ledger)

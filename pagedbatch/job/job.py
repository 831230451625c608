"""One run from end to end: check, resume, load, loop, finish. Knows every part of the job and no terminal."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pagedbatch.errors import PagedBatchError, RunError, UsageError
from pagedbatch.job.constraints import ConstraintSource, read_run_constraint
from pagedbatch.job.hub import go_offline_if_needed
from pagedbatch.job.interrupts import EXIT_INTERRUPTED, Interrupts
from pagedbatch.job.journal import Journal, Manifest
from pagedbatch.job.loop import RowLoop, RowsView
from pagedbatch.job.output import OutputPaths, output_paths, write_atomically
from pagedbatch.job.prompts import PROMPT_FIELDS, template_fields
from pagedbatch.job.reader import Source, Survey, open_source, survey
from pagedbatch.job.records import RecordWriter
from pagedbatch.job.run_stats import build_stats, describe_settings, versions
from pagedbatch.job.settings import RunSettings
from pagedbatch.job.startup import DeviceSide, TextSide, open_device_side, open_text_side
from pagedbatch.params import resolve
from pagedbatch.stats.memory import MemoryAccount

EXIT_ROWS_FAILED = 3

#: Settings that decide what is written, beside the generation parameters. The others change only how fast.
_RESULT_SETTINGS = (
    "split", "subset", "prompt_column", "prompt_template", "chat", "generation_config", "dtype", "trust_remote_code",
)  # fmt: skip

#: Rows inside the engine at a time, in units of `max_num_seqs`: enough that it never waits for the next one.
_WINDOW = 2


@dataclass(frozen=True, slots=True)
class Ui:
    """How the job talks to whoever started it: one-line notices; a display, made from (rows in all, rows resumed)."""

    notice: Callable[[str], None]
    open_view: Callable[[int, int], AbstractContextManager[RowsView]]


@dataclass(frozen=True, slots=True)
class JobResult:
    """How a run ended. `paths` is None where the output went to stdout."""

    exit_code: int
    stats: dict[str, Any]
    paths: OutputPaths | None


def run_job(settings: RunSettings, ui: Ui) -> JobResult:
    """Answers every row of the input, or as many as an interrupt allows.

    Raises:
        UsageError: something is wrong with the settings, the input or the model; nothing was started.
        RunError: the run failed; what had finished is in the journal.
    """
    began = time.perf_counter()
    paths = output_paths(settings.output, settings.input)
    go_offline_if_needed(settings.input, settings.model)
    with Interrupts() as interrupts:
        source = open_source(settings.input, split=settings.split, subset=settings.subset)
        found = survey(source, limit=settings.limit, allow_duplicate_ids=settings.allow_duplicate_ids)
        _check_columns(settings, source, found)
        constraint = read_run_constraint(settings)
        with _open_journal(settings, source, found, paths, constraint) as journal:
            _tell_resumed(journal, found, ui)
            text = open_text_side(settings, constraint, ui.notice)
            device = open_device_side(settings, text)
            return _Run(settings, source, found, paths, journal, text, device, began).run(ui, interrupts)


@dataclass(frozen=True, slots=True)
class _Run:
    """A run whose parts are all there: nothing that the user did can be wrong any more but single rows."""

    settings: RunSettings
    source: Source
    found: Survey
    paths: OutputPaths | None
    journal: Journal
    text: TextSide
    device: DeviceSide
    began: float

    def run(self, ui: Ui, interrupts: Interrupts) -> JobResult:
        account = MemoryAccount(
            num_blocks=self.device.runner.num_blocks,
            block_size=self.settings.block_size,
            block_bytes=self.device.runner.block_bytes,
            max_num_seqs=self.settings.max_num_seqs,
        )
        interrupts.deferred = True
        with ui.open_view(self.found.num_rows, self.journal.num_resumed) as view:
            loop = RowLoop(
                rows=self.source.rows(self.settings.limit),
                engine=self.device.engine,
                prompts=self.text.prompts,
                records=RecordWriter(self.text.tokenizer),
                journal=self.journal,
                account=account,
                view=view,
                interrupts=interrupts,
                model=self.settings.model,
                window=_WINDOW * self.settings.max_num_seqs,
            )
            try:
                loop.run()
            except PagedBatchError:
                with suppress(RunError):
                    self._write_stats(self._stats(loop, account))
                ui.notice(self._resume_hint())
                raise
        stats = self._stats(loop, account)
        self._write_stats(stats)
        if self.journal.num_finished < self.found.num_rows:
            ui.notice(f"interrupted: {self._resume_hint()}")
            return JobResult(EXIT_INTERRUPTED, stats, self.paths)
        self._write_output()  # last: while the journal is there, everything can be done again
        return JobResult(EXIT_ROWS_FAILED if self.journal.num_error else 0, stats, self.paths)

    def _stats(self, loop: RowLoop, account: MemoryAccount) -> dict[str, Any]:
        account.close(self.device.engine.pool_counts())
        first_step_at = loop.totals.first_step_at
        runner = self.device.runner
        return build_stats(
            settings=describe_settings(
                self.settings,
                self.text.params,
                self.text.defaults.generation,
                used={
                    "attention": runner.backend_name,
                    "num_blocks": runner.num_blocks,
                    "device": str(self.device.loaded.device),
                    "dtype": str(self.device.loaded.dtype).removeprefix("torch."),
                },
            ),
            num_rows=self.found.num_rows,
            journal=self.journal,
            totals=loop.totals,
            startup_seconds=(time.perf_counter() if first_step_at is None else first_step_at) - self.began,
            account=account,
        )

    def _write_output(self) -> None:
        """Writes every record in input order, then ends the journal."""
        if self.paths is not None:
            write_atomically(self.paths.output, self.journal.records())
        else:
            sys.stdout.buffer.writelines(self.journal.records())
            sys.stdout.buffer.flush()
        self.journal.remove()

    def _write_stats(self, stats: dict[str, Any]) -> None:
        if self.paths is not None:
            text = json.dumps(stats, indent=2, ensure_ascii=False, allow_nan=False)
            write_atomically(self.paths.stats, [text.encode(), b"\n"])

    def _resume_hint(self) -> str:
        finished = f"{self.journal.num_finished} of {self.found.num_rows} rows are finished"
        if self.paths is None:
            return f"{finished}, and lost: --output - can't be resumed"
        return f"{finished} and kept in {self.paths.journal}: the same command goes on from there"


def _check_columns(settings: RunSettings, source: Source, found: Survey) -> None:
    """Refuses a run in which no row has what prompts are made of. Single rows without it are error rows."""
    if not found.columns:
        return
    place = f"{source.name}, split {settings.split}," if settings.split else source.name
    listed = ", ".join(found.columns)
    if settings.prompt_column is not None:
        setting = "--prompt-column"
        wanted: tuple[str, ...] = (settings.prompt_column,)
    elif settings.prompt_template is not None:
        setting = "--prompt-template"
        wanted = template_fields(settings.prompt_template)
    elif not any(name in found.columns for name in (*PROMPT_FIELDS, "custom_id", "body")):
        raise UsageError(
            f"{place} has no column prompt, messages or prompt_token_ids: "
            f"choose one with --prompt-column; its columns are {listed}"
        )
    else:
        return
    for name in wanted:
        if name not in found.columns and name.partition(".")[0] not in found.columns:
            raise UsageError(f"{setting}: {place} has no column {name!r}; its columns are {listed}")


def _open_journal(
    settings: RunSettings, source: Source, found: Survey, paths: OutputPaths | None, constraint: ConstraintSource | None
) -> Journal:
    model = os.path.realpath(settings.model) if Path(settings.model).exists() else settings.model
    params = asdict(resolve({}, settings.generation))
    manifest = Manifest(
        input={"name": source.name, "fingerprint": source.fingerprint},
        model=model,
        settings={name: getattr(settings, name) for name in _RESULT_SETTINGS}
        | {name: params[name] for name in settings.generation}
        | ({} if constraint is None else {"constraint": constraint.fingerprint}),
        versions=versions(),
    )
    if paths is None:
        return Journal.temporary(tempfile.TemporaryFile(), manifest, num_rows=found.num_rows)
    return Journal.open(paths.journal, manifest, num_rows=found.num_rows, restart=settings.restart)


def _tell_resumed(journal: Journal, found: Survey, ui: Ui) -> None:
    if journal.num_damaged:
        ui.notice(f"{journal.num_damaged} damaged lines of the journal don't count: their rows run again")
    if journal.num_resumed:
        ui.notice(f"resuming: {journal.num_resumed} of {found.num_rows} rows are finished already")
        mine = versions()
        changed = [f"{name} {was} -> {mine.get(name)}" for name, was in journal.stored_versions.items()
                   if mine.get(name) != was]  # fmt: skip
        if changed:
            ui.notice(f"other versions wrote the rows so far: {', '.join(changed)}")

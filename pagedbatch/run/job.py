"""One run from end to end: check, resume, load, loop, finish. Knows every part of the job and no terminal."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from pagedbatch.constraints.build import ConstraintSource
from pagedbatch.errors import ExitCode, PagedBatchError, RunError, UsageError
from pagedbatch.fingerprint import model_fingerprint
from pagedbatch.input.hub import go_offline_if_needed
from pagedbatch.input.reader import Source, Survey
from pagedbatch.output.finished_row import Answer, AnswerWriter
from pagedbatch.output.first_start import first_start
from pagedbatch.output.journal import Journal
from pagedbatch.output.journal_lines import Manifest, ModelIdentity
from pagedbatch.output.paths import OutputPaths, output_paths
from pagedbatch.output.records import RecordWriter
from pagedbatch.output.shard_outputs import describe_shard
from pagedbatch.output.stats_file import build_stats, describe_settings, versions, write_stats
from pagedbatch.output.totals import Totals
from pagedbatch.output.write import clear_leftovers, stats_of_finished, write_output
from pagedbatch.params import resolve
from pagedbatch.run.interrupts import Interrupts
from pagedbatch.run.loop import RowsView
from pagedbatch.run.one_process import OneProcess
from pagedbatch.run.open import OpenedJob, open_input, open_job
from pagedbatch.run.pending_rows import Unfinished
from pagedbatch.run.startup import open_device_side
from pagedbatch.settings import RunSettings
from pagedbatch.shard import shard_settings
from pagedbatch.stats.memory import MemoryAccount
from pagedbatch.stats.schema import Stats, Worker
from pagedbatch.wording import finished_of, plural


@dataclass(frozen=True, slots=True)
class Ui:
    """How the job talks to whoever started it: one-line notices; a display, made from (rows in all, rows resumed)."""

    notice: Callable[[str], None]
    open_view: Callable[[int, int], AbstractContextManager[RowsView]]


class Engines(Protocol):
    """What answers the rows: one engine in this process, or many in workers."""

    @property
    def totals(self) -> Totals: ...

    def run(
        self, rows: Unfinished, deliver: Callable[[Answer], None], view: RowsView, interrupts: Interrupts
    ) -> None: ...

    def account(self) -> MemoryAccount: ...

    def used(self) -> dict[str, Any]: ...

    def workers(self) -> list[Worker] | None: ...


@dataclass(frozen=True, slots=True)
class JobResult:
    """How a run ended. `paths` is None where the output went to stdout."""

    exit_code: int
    stats: Stats
    paths: OutputPaths | None


def run_job(settings: RunSettings, ui: Ui) -> JobResult:
    """Answers every row of the input, or as many as an interrupt allows.

    Raises:
        UsageError: something is wrong with the settings, the input or the model; nothing was started.
        RunError: the run failed; what had finished is in the journal.
    """
    began = time.perf_counter()
    paths = output_paths(settings.output, settings.input)
    if paths is None and settings.shard is not None:
        raise UsageError("--shard needs a file as --output: pagedbatch merge reads the stats that stand beside it")
    go_offline_if_needed(settings.input, settings.model)
    with ExitStack() as stack:
        interrupts = stack.enter_context(Interrupts())
        given = open_input(settings, ui.notice)
        source, rows, constraint = given.source, given.rows, given.constraint
        manifest = _manifest(settings, source, rows, given.found.num_rows, constraint)
        resumable = None if paths is None or settings.restart else paths.journal
        manifest = replace(manifest, started=first_start(resumable, manifest))
        settings = replace(settings, started=manifest.started)
        opened = stack.enter_context(closing(open_job(settings, given, ui.notice)))
        text = opened.text
        date = _date_written(settings, opened)
        if settings.shard is not None and date is not None and settings.date is None:
            ui.notice(f"the chat template writes the date, {date}: --date gives all shards the same")
        with _open_journal(settings, manifest, rows, paths) as journal:
            clear_leftovers(paths)
            _tell_resumed(journal, rows, ui)
            if journal.is_complete and journal.num_resumed and paths is not None:
                stats = stats_of_finished(paths, journal)
                if stats is not None:
                    return _finish(settings, paths, opened.found, journal, stats, ui)
            unfinished = Unfinished(source, rows, journal.finished_rows())
            batch_model = None if paths is not None and paths.is_parquet else settings.model_names[0]
            if settings.uses_workers:
                from pagedbatch.run.workers.pool import open_workers
                from pagedbatch.run.workers.setup import EnginePlan

                plan = EnginePlan(settings, constraint, batch_model)
                engines_of_run: AbstractContextManager[Engines] = open_workers(
                    plan, text.params.width, unfinished, ui.notice
                )
            else:
                answers = AnswerWriter(RecordWriter(text.tokenizer), batch_model)
                device = open_device_side(settings, text)
                engines_of_run = nullcontext(OneProcess(settings, opened.preparation, answers, device))
            with engines_of_run as engines:
                run = _Run(settings, opened, manifest, paths, journal, unfinished, engines, began)
                return run.run(ui, interrupts)


def _finish(
    settings: RunSettings,
    paths: OutputPaths | None,
    found: Survey,
    journal: Journal,
    stats: Stats,
    ui: Ui,
) -> JobResult:
    """Writes the output of a run whose rows are all finished and whose stats are written.

    The journal is kept where error rows can be retried, or a higher limit would go on from there: not that of a shard,
    whose rows would be others.
    """
    goes_on = found.is_cut and settings.shard is None
    # Last: while the journal is there, everything can be done again.
    write_output(paths, journal, keep_journal=journal.num_error > 0 or goes_on)
    if journal.num_error and paths is not None:
        errors = plural(journal.num_error, "row is an error", "rows are errors")
        these = "it" if journal.num_error == 1 else "these"
        ui.notice(f"{errors}: the same command with --retry-errors runs {these} again")
    return JobResult(ExitCode.ROW_ERRORS if journal.num_error else ExitCode.OK, stats, paths)


@dataclass(frozen=True, slots=True)
class _Run:
    """A run whose parts are all there: nothing that the user did can be wrong any more but single rows."""

    settings: RunSettings
    opened: OpenedJob
    manifest: Manifest
    paths: OutputPaths | None
    journal: Journal
    unfinished: Unfinished
    engines: Engines
    began: float

    def run(self, ui: Ui, interrupts: Interrupts) -> JobResult:
        interrupts.deferred = True
        with ui.open_view(len(self.unfinished.rows), self.journal.num_resumed) as view:
            try:
                self.engines.run(self.unfinished, self._deliver, view, interrupts)
                if not self.journal.is_complete and not interrupts.requested:
                    name = self.opened.source.name
                    raise RunError(f"{name} holds fewer rows than when the run began: it was changed")
            except PagedBatchError:
                with suppress(RunError):
                    self._write_stats(self._stats())
                ui.notice(self._resume_hint())
                raise
        stats = self._stats()
        try:
            self._write_stats(stats)
            if self.journal.is_complete:
                return _finish(self.settings, self.paths, self.opened.found, self.journal, stats, ui)
            self.journal.sync()
        except RunError:
            ui.notice(self._resume_hint())
            raise
        ui.notice(f"interrupted: {self._resume_hint()}")
        return JobResult(ExitCode.INTERRUPTED, stats, self.paths)

    def _deliver(self, answer: Answer) -> None:
        self.journal.append(answer.row, answer.record, ok=answer.ok)

    def _write_stats(self, stats: Stats) -> None:
        if self.paths is not None:
            write_stats(self.paths.stats, stats)

    def _stats(self) -> Stats:
        totals = self.engines.totals
        first_step_at = totals.first_step_at
        date = _date_written(self.settings, self.opened)
        stats = build_stats(
            settings=describe_settings(
                self.settings,
                self.opened.text.params,
                self.opened.text.defaults.generation.values,
                used=self.engines.used() | ({} if date is None else {"date": date}),
            ),
            num_rows=len(self.unfinished.rows),
            journal=self.journal,
            totals=totals,
            startup_seconds=(time.perf_counter() if first_step_at is None else first_step_at) - self.began,
            account=self.engines.account(),
            workers=self.engines.workers(),
        )
        if self.settings.shard is not None:
            # Parts with another date in their prompts are not of one run.
            shard = describe_shard(self.manifest, self.unfinished.rows, self.opened.found.num_rows, {"date": date})
            stats = replace(stats, shard=shard)
        return stats

    def _resume_hint(self) -> str:
        finished = finished_of(self.journal.num_finished, len(self.unfinished.rows))
        if self.paths is None:
            return f"{finished}, and lost: --output - can't be resumed"
        return f"{finished} and kept in {self.paths.journal}: the same command goes on from there"


def _manifest(
    settings: RunSettings, source: Source, rows: range, num_rows: int, constraint: ConstraintSource | None
) -> Manifest:
    params = asdict(resolve({}, settings.generation))
    try:
        fingerprint = model_fingerprint(settings.model)
    except OSError as error:
        raise UsageError(f"can't read {settings.model}: {error.strerror}") from None
    return Manifest(
        input=source.content,
        model=ModelIdentity(settings.model, fingerprint),
        settings=settings.for_manifest()
        | {name: params[name] for name in settings.generation}
        | ({} if constraint is None else {"constraint": constraint.fingerprint})
        | ({} if source.label is None else {"format": source.label})
        | shard_settings(settings.shard, rows, num_rows),
        versions=versions(),
    )


def _date_written(settings: RunSettings, opened: OpenedJob) -> str | None:
    """The day that the chat template writes into prompts of this run; None where there are no chats or no date."""
    made = settings.prompt_column is not None or settings.prompt_template is not None
    has_chats = not made and any(name in opened.found.columns for name in ("messages", "custom_id", "body"))
    return opened.text.prompts.date if settings.chat or has_chats else None


def _open_journal(settings: RunSettings, manifest: Manifest, rows: range, paths: OutputPaths | None) -> Journal:
    if paths is None:
        return Journal.temporary(manifest, num_rows=len(rows))
    return Journal.open(
        paths.journal,
        manifest,
        num_rows=len(rows),
        first_row=rows.start,
        restart=settings.restart,
        retry_errors=settings.retry_errors,
    )


def _tell_resumed(journal: Journal, rows: range, ui: Ui) -> None:
    if journal.num_retried:
        ui.notice(f"{plural(journal.num_retried, 'error row runs', 'error rows run')} again")
    if journal.num_resumed:
        ui.notice(f"resuming: {finished_of(journal.num_resumed, len(rows))} already")
        mine = versions()
        changed = [f"{name} {was} -> {mine.get(name)}" for name, was in journal.stored_versions.items()
                   if mine.get(name) != was]  # fmt: skip
        if changed:
            ui.notice(f"other versions wrote the rows so far: {', '.join(changed)}")

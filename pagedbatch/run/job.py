"""One run from end to end: open the input, resume, load the model, run the rows, write the output."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from pagedbatch.errors import ExitCode, PagedBatchError, RunError, UsageError
from pagedbatch.fingerprint import model_fingerprint
from pagedbatch.input.hub import go_offline_if_needed
from pagedbatch.output.finished_row import FinishedRow, FinishedRowWriter
from pagedbatch.output.journal import Journal
from pagedbatch.output.manifest import Manifest, first_start
from pagedbatch.output.paths import OutputPaths, output_paths
from pagedbatch.output.records import RecordWriter
from pagedbatch.output.shard_outputs import describe_shard
from pagedbatch.output.stats_file import build_stats, describe_settings, versions, write_stats
from pagedbatch.output.totals import Totals
from pagedbatch.output.write import clear_leftovers, stats_of_finished, write_output
from pagedbatch.params import resolve
from pagedbatch.run.interrupts import Interrupts
from pagedbatch.run.local_engine import LocalEngine
from pagedbatch.run.loop import RowsView
from pagedbatch.run.open import JobInput, PreparedJob, open_input, prepare_job
from pagedbatch.run.pending_rows import PendingRows
from pagedbatch.run.setup import set_up_engine
from pagedbatch.settings import RunSettings
from pagedbatch.shard import shard_settings
from pagedbatch.stats.memory import MemoryAccount
from pagedbatch.stats.schema import ModelIdentity, Stats, Worker
from pagedbatch.wording import finished_of, plural

_log = logging.getLogger(__name__)

#: Makes the display of a run, from its number of rows and how many of them are resumed.
OpenView = Callable[[int, int], AbstractContextManager[RowsView]]


class Engines(Protocol):
    """What runs the rows: one engine in this process, or one in each worker."""

    @property
    def totals(self) -> Totals: ...

    def run(
        self, rows: PendingRows, deliver: Callable[[FinishedRow], None], view: RowsView, interrupts: Interrupts
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


def run_job(settings: RunSettings, open_view: OpenView) -> JobResult:
    """Answers every row of the input, or as many as an interrupt allows.

    Raises:
        UsageError: something is wrong with the settings, the input or the model; nothing was started.
        RunError: the run failed; what had finished is in the journal.
    """
    began = time.perf_counter()
    paths = output_paths(settings.output, settings.input)
    if paths is None and settings.shard is not None:
        raise UsageError("--shard needs a file as --output: pagedbatch merge reads the stats file beside it")
    go_offline_if_needed(settings.input, settings.model)
    with ExitStack() as stack:
        interrupts = stack.enter_context(Interrupts())
        job_input = open_input(settings)
        manifest = _manifest(settings, job_input, paths)
        settings = replace(settings, started=manifest.started)
        job = stack.enter_context(closing(prepare_job(settings, job_input)))
        _log_date(settings, job)
        journal = stack.enter_context(_open_journal(settings, manifest, job_input.rows, paths))
        clear_leftovers(paths)
        _log_resumed(journal, job_input.rows)
        stats = _stats_of_complete(journal, paths)
        if stats is not None:
            return _finish(settings, paths, job_input, journal, stats)
        pending = PendingRows(job_input.source, job_input.rows, journal.finished_rows())
        engines = stack.enter_context(_open_engines(settings, job, pending, paths))
        return _Run(settings, job, manifest, paths, journal, pending, engines, began).run(open_view, interrupts)


def _open_engines(
    settings: RunSettings, job: PreparedJob, pending: PendingRows, paths: OutputPaths | None
) -> AbstractContextManager[Engines]:
    to_parquet = paths is not None and paths.is_parquet  # which has no columns for OpenAI's format
    openai_model = None if to_parquet else settings.model_names[0]
    if settings.uses_workers:
        from pagedbatch.run.workers.pool import open_workers
        from pagedbatch.run.workers.worker_engine import WorkerPlan

        plan = WorkerPlan(settings, job.input.constraint, openai_model)
        return open_workers(plan, job.tokenizer_setup.params.width, pending)
    writer = FinishedRowWriter(RecordWriter(job.tokenizer_setup.tokenizer), openai_model)
    engine_setup = set_up_engine(settings, job.tokenizer_setup)
    return nullcontext(LocalEngine(settings, job.preparation, writer, engine_setup))


def _finish(
    settings: RunSettings, paths: OutputPaths | None, job_input: JobInput, journal: Journal, stats: Stats
) -> JobResult:
    """Writes the output of a run whose rows are all finished and whose stats are written.

    The journal is kept where error rows can be retried, or where a higher limit would go on from it; but not that of a
    shard under a limit, whose rows would change with it.
    """
    can_grow = job_input.survey.is_cut and settings.shard is None
    # Last: while the journal is there, everything can be done again.
    write_output(paths, journal, keep_journal=journal.num_error > 0 or can_grow)
    if journal.num_error and paths is not None:
        errors = plural(journal.num_error, "row is an error", "rows are errors")
        these = "it" if journal.num_error == 1 else "these"
        _log.info(f"{errors}: the same command with --retry-errors runs {these} again")
    return JobResult(ExitCode.ROW_ERRORS if journal.num_error else ExitCode.OK, stats, paths)


@dataclass(frozen=True, slots=True)
class _Run:
    """A run that is ready to go: from here on, only single rows can be the user's mistakes."""

    settings: RunSettings
    job: PreparedJob
    manifest: Manifest
    paths: OutputPaths | None
    journal: Journal
    pending: PendingRows
    engines: Engines
    began: float

    def run(self, open_view: OpenView, interrupts: Interrupts) -> JobResult:
        interrupts.deferred = True
        with open_view(len(self.pending.rows), self.journal.num_resumed) as view:
            try:
                self.engines.run(self.pending, self._deliver, view, interrupts)
                if not self.journal.is_complete and not interrupts.requested:
                    name = self.job.input.source.name
                    raise RunError(f"{name} holds fewer rows than when the run began: it was changed")
            except PagedBatchError:
                with suppress(RunError):
                    self._write_stats(self._stats())
                _log.info(self._resume_hint())
                raise
        stats = self._stats()
        try:
            self._write_stats(stats)
            if self.journal.is_complete:
                return _finish(self.settings, self.paths, self.job.input, self.journal, stats)
            self.journal.sync()
        except RunError:
            _log.info(self._resume_hint())
            raise
        _log.info(f"interrupted: {self._resume_hint()}")
        return JobResult(ExitCode.INTERRUPTED, stats, self.paths)

    def _deliver(self, finished: FinishedRow) -> None:
        self.journal.append(finished.index, finished.record, ok=finished.ok)

    def _write_stats(self, stats: Stats) -> None:
        if self.paths is not None:
            write_stats(self.paths.stats, stats)

    def _stats(self) -> Stats:
        totals = self.engines.totals
        first_step_at = totals.first_step_at
        tokenizer_setup = self.job.tokenizer_setup
        date = _date_written(self.settings, self.job)
        stats = build_stats(
            settings=describe_settings(
                self.settings,
                tokenizer_setup.params,
                tokenizer_setup.defaults.generation.values,
                used=self.engines.used() | ({} if date is None else {"date": date}),
            ),
            num_rows=len(self.pending.rows),
            journal=self.journal,
            totals=totals,
            startup_seconds=(time.perf_counter() if first_step_at is None else first_step_at) - self.began,
            account=self.engines.account(),
            workers=self.engines.workers(),
        )
        if self.settings.shard is not None:
            # Shards with different dates in their prompts are not of one run.
            num_rows = self.job.input.survey.num_rows
            stats = replace(stats, shard=describe_shard(self.manifest, self.pending.rows, num_rows, {"date": date}))
        return stats

    def _resume_hint(self) -> str:
        finished = finished_of(self.journal.num_finished, len(self.pending.rows))
        if self.paths is None:
            return f"{finished}, and lost: --output - can't be resumed"
        return f"{finished} and kept in {self.paths.journal}: the same command goes on from there"


def _manifest(settings: RunSettings, job_input: JobInput, paths: OutputPaths | None) -> Manifest:
    params = asdict(resolve({}, settings.generation))
    try:
        fingerprint = model_fingerprint(settings.model)
    except OSError as error:
        raise UsageError(f"can't read {settings.model}: {error.strerror}") from None
    source, constraint = job_input.source, job_input.constraint
    manifest = Manifest(
        input=source.content,
        model=ModelIdentity(name=settings.model, fingerprint=fingerprint),
        settings=settings.for_manifest()
        | {name: params[name] for name in settings.generation}
        | ({} if constraint is None else {"constraint": constraint.fingerprint})
        | ({} if source.label is None else {"format": source.label})
        | shard_settings(settings.shard, job_input.rows, job_input.survey.num_rows),
        versions=versions(),
    )
    resumable = None if paths is None or settings.restart else paths.journal
    return replace(manifest, started=first_start(resumable, manifest))


def _date_written(settings: RunSettings, job: PreparedJob) -> str | None:
    """The day that the chat template writes into prompts of this run; None where there are no chats or no date."""
    made = settings.prompt_column is not None or settings.prompt_template is not None
    has_chats = not made and any(name in job.input.survey.columns for name in ("messages", "custom_id", "body"))
    return job.tokenizer_setup.prompts.date if settings.chat or has_chats else None


def _log_date(settings: RunSettings, job: PreparedJob) -> None:
    if settings.shard is not None and settings.date is None:
        date = _date_written(settings, job)
        if date is not None:
            _log.info(f"the chat template writes the date, {date}: --date gives all shards the same")


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


def _stats_of_complete(journal: Journal, paths: OutputPaths | None) -> Stats | None:
    """The stats of an earlier run that finished every row; None if rows are left to run, or stats to be made."""
    if not journal.is_complete or not journal.num_resumed or paths is None:
        return None
    return stats_of_finished(paths, journal)


def _log_resumed(journal: Journal, rows: range) -> None:
    if journal.num_retried:
        _log.info(f"{plural(journal.num_retried, 'error row runs', 'error rows run')} again")
    if journal.num_resumed:
        _log.info(f"resuming: {finished_of(journal.num_resumed, len(rows))} already")
        mine = versions()
        changed = [f"{name} {was} -> {mine.get(name)}" for name, was in journal.stored_versions.items()
                   if mine.get(name) != was]  # fmt: skip
        if changed:
            _log.info(f"other versions wrote the rows so far: {', '.join(changed)}")

"""The engine: requests in, finished outputs out, one step at a time. The runner is a protocol with one method."""

from __future__ import annotations

import copy
import time
import traceback
from collections.abc import Iterator
from itertools import chain, groupby
from typing import Protocol

from pagedbatch.config import EngineConfig
from pagedbatch.engine.block_map import PeakMapper
from pagedbatch.engine.group_update import GroupUpdater
from pagedbatch.engine.isolation import Isolation, is_fatal
from pagedbatch.engine.scheduler import Scheduler
from pagedbatch.engine.step_builder import StepBuilder
from pagedbatch.engine.stopping import LENGTH, Detokenize, StopChecker
from pagedbatch.errors import PagedBatchError
from pagedbatch.outputs import BlockMap, CompletionOutput, PoolCounts, RequestOutput, StepOutput, StepSnapshot
from pagedbatch.params import GenerationParams
from pagedbatch.sequence import FinishedSequence, Request, SequenceGroup, Source, output_token_ids
from pagedbatch.step import ModelRunnerOutput, SampleTask, ScheduledSequence, SchedulerOutput, StepSeconds, TopLogprobs
from pagedbatch.wording import named

#: A row's error when not even one of its outputs could be completed.
NO_OUTPUT = "no output is possible: the row's settings leave no token to choose before one is complete"

#: The key of draws that are no row's.
_NOBODY = 2**64 - 1


class Runner(Protocol):
    """Executes a step on the device."""

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput: ...


class Engine:
    """Continuous batching over one pool. Rows go in with `add`; `step` until `has_unfinished` is False."""

    def __init__(self, config: EngineConfig, runner: Runner, detokenize: Detokenize | None = None) -> None:
        self.config = config
        self._runner = runner
        stops = StopChecker(config.eos_token_ids, detokenize)
        self.scheduler = Scheduler(config, stops)
        self._isolation = Isolation(self.scheduler)
        self._updater = GroupUpdater(self.scheduler.blocks, stops, self.scheduler.new_seq_id)
        self._peak_mapper = PeakMapper()
        self._num_steps = 0
        self._answered: list[RequestOutput] = []  # what needed no step

    @property
    def num_unfinished(self) -> int:
        return self.scheduler.num_unfinished + len(self._answered)

    @property
    def has_unfinished(self) -> bool:
        return self.num_unfinished > 0

    def pool_counts(self) -> PoolCounts:
        return self.scheduler.blocks.counts()

    def add(self, request: Request) -> None:
        """Queues a request; a later `step` returns its `RequestOutput`."""
        if request.computes_nothing:
            self._answered.append(_finished(SequenceGroup(request, arrival=0, max_width=0)))
        else:
            self.scheduler.add(request)

    def step(self) -> StepOutput:
        """Schedules, executes and applies one step. One that fails is taken back, and tried again in parts.

        Raises:
            Exception: the runner's own, where it fails whatever it is given.
            EngineStalledError: work is left, but nothing could be scheduled.
            BlockAccountingError: the pool's books don't balance (a bug).
        """
        began = time.perf_counter()
        builder, rejected = self.scheduler.schedule()
        pool = self.pool_counts()  # at its fullest: blocks are taken, nothing is given back yet
        running, sequences = len(self.scheduler.running), self.scheduler.num_running_sequences
        block_map = self._map_blocks(pool.live, sequences) if self._peak_mapper.wants(pool.live) else None
        scheduled = time.perf_counter()
        self._answered += [_failed(group, reason) for group, reason in rejected]
        result = self._execute(builder) if builder.sequences else ModelRunnerOutput([], [])
        executed = time.perf_counter()
        finished, self._answered = self._answered, []
        if result is not None:
            finished += self._update(builder, result)
            self._num_steps += 1
        if self.config.check_invariants:
            self.scheduler.blocks.check_integrity()
        ended = time.perf_counter()
        snapshot = StepSnapshot(
            step=self._num_steps,
            pool=pool,
            counters=copy.copy(self.scheduler.counters),
            running_groups=running,
            running_sequences=sequences,
            waiting_groups=self.scheduler.num_waiting,
            num_tokens=0 if result is None else builder.num_tokens,
            seconds=StepSeconds() if result is None else result.seconds,
            host_seconds=(scheduled - began) + (ended - executed),
            step_seconds=ended - began,
            block_map=block_map,
        )
        return StepOutput(finished, snapshot)

    def _map_blocks(self, live_blocks: int, num_sequences: int) -> BlockMap:
        blocks = self.scheduler.blocks
        tables = (
            (group.request.request_id, self.scheduler.sources.blocks_of(group) + blocks.block_table(seq.seq_id))
            for group in self.scheduler.running
            for seq in group.sequences
            if blocks.has_table(seq.seq_id)
        )
        return self._peak_mapper.draw(live_blocks, tables, num_sequences)

    def _execute(self, builder: StepBuilder) -> ModelRunnerOutput | None:
        """Runs a step. None: it failed, was taken back, and its groups are on trial, or the one to blame is answered.

        Raises:
            Exception: the runner's own, where no row is to blame: the device does nothing any more.
        """
        try:
            return self._runner.execute(builder.build(self._num_steps))
        except PagedBatchError:
            raise
        except Exception as error:
            if is_fatal(error):
                raise
            traceback.clear_frames(error.__traceback__)  # they hold on to the memory of the step
            self.scheduler.counters.failed_steps += 1
            culprit = self._isolation.step_failed(builder, error)
            if culprit is not None:
                if not self._is_alive(culprit):
                    raise
                reason = f"the model can't run this row, though it ran alone: {named(error)}"
                self._answered.append(_failed(culprit, reason))
            return None

    def _is_alive(self, culprit: SequenceGroup) -> bool:
        """Whether the runner can do anything at all: one token of nobody's, with a source if the culprit has one."""
        blocks, seq_id = self.scheduler.blocks, self.scheduler.new_seq_id()
        blocks.create_table(seq_id, blocks.root_of(0), [])
        blocks.extend(seq_id, 0, 1)
        builder = StepBuilder(tokens_left=1, scores_left=0)
        seq_index = builder.add(ScheduledSequence(seq_id, [0], 0, blocks.block_table(seq_id)))
        builder.samples.append(SampleTask(seq_index, GenerationParams(), _NOBODY, (0,), 0))
        source = None if culprit.source is None else Source(self.scheduler.new_seq_id(), [0])
        if source is not None:
            blocks.create_source_table(source.seq_id, blocks.root_of(0), [])
            blocks.extend(source.seq_id, 0, 1)
            builder.read_source(seq_index, source, blocks.block_table(source.seq_id))
        try:
            self._runner.execute(builder.build(self._num_steps))
        except Exception:
            return False
        finally:
            blocks.free(seq_id)
            if source is not None:
                blocks.free(source.seq_id)
        return True

    def _update(self, builder: StepBuilder, result: ModelRunnerOutput) -> Iterator[RequestOutput]:
        """Applies the results group by group; yields what finished."""
        counters = self.scheduler.counters
        touched = {group.arrival: group for group in builder.broken}
        errors = _errors(builder, result)
        for seq, task, drawn in zip(builder.samplers, builder.samples, result.samples, strict=True):
            group = seq.group
            touched[group.arrival] = group
            if group.arrival in errors or group.error is not None:
                continue
            try:
                self._updater.update_sample(seq, task, drawn)
            except Exception as error:
                group.error = _own_error(error)
            counters.output_tokens += len(drawn.token_ids)
        searches = zip(builder.searchers, builder.beams, result.beams, strict=True)
        for group, own in groupby(searches, key=lambda search: search[0]):
            _, tasks, ranked = zip(*own, strict=True)
            touched[group.arrival] = group
            if group.arrival in errors:
                continue
            try:
                group.search_is_over = self._updater.update_beams(group, list(tasks), list(ranked))
            except Exception as error:
                group.error = _own_error(error)
            width = group.params.beams_per_group
            counters.output_tokens += sum(min(len(each.token_ids), width) for each in ranked)
        for group, scores in zip(builder.scored, result.prompts, strict=True):
            touched[group.arrival] = group
            if group.arrival not in errors:
                group.prompt_scores.extend(scores)
        yield from self._settle(builder, touched, errors)

    def _settle(
        self, builder: StepBuilder, touched: dict[int, SequenceGroup], errors: dict[int, str]
    ) -> Iterator[RequestOutput]:
        """Retires the groups that are finished. An error is believed of a group that ran alone; others try that."""
        doubted = []
        for arrival, group in touched.items():
            if arrival in errors and not self._isolation.tries_one:
                doubted.append(group)
                continue
            group.error = group.error or errors.get(arrival)
            if group.error is not None or group.is_over:
                self.scheduler.retire(group)
                if group.error is None and not group.finished and group.params.max_tokens > 0:
                    group.error = NO_OUTPUT
                yield _failed(group, group.error) if group.error is not None else _finished(group)
        if doubted:
            beside = [group for group in self.scheduler.groups_in(builder) if group.arrival not in touched]
            self._isolation.doubt(doubted, beside)
        self._isolation.step_succeeded()


def _errors(builder: StepBuilder, result: ModelRunnerOutput) -> dict[int, str]:
    """What the runner says went wrong with single groups, by their arrival."""
    drawn = ((seq.group, each.error) for seq, each in zip(builder.samplers, result.samples, strict=True))
    ranked = ((group, each.error) for group, each in zip(builder.searchers, result.beams, strict=True))
    scored = ((group, each.error) for group, each in zip(builder.scored, result.prompts, strict=True))
    return {group.arrival: error for group, error in chain(drawn, ranked, scored) if error is not None}


def _own_error(error: Exception) -> str:
    """What to tell of a row whose tokens can't be taken in.

    Raises:
        PagedBatchError: it is no row's.
    """
    if isinstance(error, PagedBatchError):
        raise error
    return f"its tokens can't be taken in: {named(error)}"


def _failed(group: SequenceGroup, reason: str) -> RequestOutput:
    return RequestOutput(group.request.request_id, [], group.request.num_input_tokens, error=reason)


def _finished(group: SequenceGroup) -> RequestOutput:
    """The outputs of a finished group: samples by index, hypotheses and `best_of` samples best first, `n` of them."""
    if not group.params.use_beam_search:
        group.finished.sort(key=lambda sequence: sequence.sample_index)
        if group.params.best_of is not None:
            group.finished.sort(key=lambda sequence: -sequence.mean_logprob)  # stable: the lower index wins a tie
    if group.params.num_beam_groups > 1:
        group.finished = _distinct(group.finished, group.params.merge_end_tokens)
    outputs = [_completion(index, sequence, group) for index, sequence in enumerate(group.finished[: group.params.n])]
    if group.params.max_tokens == 0:
        outputs = [_empty_completion(index, group) for index in range(group.params.n)]
    return RequestOutput(
        request_id=group.request.request_id,
        outputs=outputs,
        num_prompt_tokens=group.request.num_input_tokens,
        num_cached_tokens=group.num_cached_tokens,
        num_preemptions=group.num_preemptions,
        prompt_scores=None if group.params.prompt_logprobs is None else group.prompt_scores,
    )


def _empty_completion(index: int, group: SequenceGroup) -> CompletionOutput:
    top_logprobs: list[TopLogprobs] | None = None if group.params.logprobs is None else []
    return CompletionOutput(index, [], [], 0.0, LENGTH.reason, LENGTH.stop_reason, top_logprobs=top_logprobs)


def _distinct(hypotheses: list[FinishedSequence], merge_end_tokens: bool) -> list[FinishedSequence]:
    """Without those that another beam group found too; the best first, and the first of equals stays."""
    found: dict[tuple[int, ...], FinishedSequence] = {}
    for hypothesis in hypotheses:
        ends_in_token = merge_end_tokens and isinstance(hypothesis.stop_reason, int)
        text_end = hypothesis.tail.parent if ends_in_token else hypothesis.tail
        found.setdefault(tuple(output_token_ids(text_end)), hypothesis)
    return list(found.values())


def _completion(index: int, sequence: FinishedSequence, group: SequenceGroup) -> CompletionOutput:
    nodes = list(sequence.tail.backwards())
    nodes.reverse()
    wants_logprobs = group.params.logprobs is not None
    return CompletionOutput(
        index=index,
        token_ids=[node.token_id for node in nodes],
        token_logprobs=[node.logprob for node in nodes],
        cumulative_logprob=sequence.cumulative_logprob,
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
        score=sequence.score,
        top_logprobs=[node.top_logprobs or [] for node in nodes] if wants_logprobs else None,
    )

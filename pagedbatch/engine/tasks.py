"""Adds the tasks of a step: tokens to sample, beams to rank, prompt tokens to score."""

from __future__ import annotations

from pagedbatch.constraint import Allowed
from pagedbatch.engine.beam_search import num_candidates
from pagedbatch.engine.step_builder import StepBuilder
from pagedbatch.engine.stopping import StopChecker
from pagedbatch.sequence import SequenceGroup, output_token_ids
from pagedbatch.step import BeamTask, History, PromptTask, SampleTask


def add_prompt_task(group: SequenceGroup, seq_index: int, start: int, stop: int, builder: StepBuilder) -> None:
    """Scores what follows the prompt tokens [start, stop), but for what is scored already."""
    first, last = group.num_scored, min(stop, len(group.prompt_token_ids) - 1)
    num_top = group.params.prompt_logprobs
    if first < last and num_top is not None:
        targets = group.prompt_token_ids[first + 1 : last + 1]
        builder.prompts.append(PromptTask(seq_index, first - start, targets, num_top))
        builder.scored.append(group)
        builder.scores_left -= len(targets)


def add_tasks(group: SequenceGroup, seq_indices: list[int], builder: StepBuilder, stops: StopChecker) -> None:
    """The group's gap closes in this step: it draws or ranks its next tokens."""
    params = group.params
    histories = None
    if group.reads_history:
        histories = [History(group.prompt_token_ids, output_token_ids(seq.tail)) for seq in group.sequences]
    allowed: list[Allowed | None] | None = None
    if group.request.constraint is not None:
        allowed = [seq.constraint.allowed() for seq in group.sequences if seq.constraint is not None]
        if all(own is None for own in allowed):
            allowed = None
    if params.use_beam_search:
        _add_searches(group, seq_indices, histories, allowed, builder, stops)
        return
    key = group.request.rng_key
    for i, (seq, seq_index) in enumerate(zip(group.sequences, seq_indices, strict=True)):
        tail = seq.tail
        position, indices = (0, params.sample_indices) if tail is None else (tail.length, (seq.sample_index,))
        history = None if histories is None else histories[i]
        own = None if allowed is None else allowed[i]
        builder.samples.append(SampleTask(seq_index, params, key, indices, position, history, own))
        builder.samplers.append(seq)


def _add_searches(
    group: SequenceGroup,
    seq_indices: list[int],
    histories: list[History] | None,
    allowed: list[Allowed | None] | None,
    builder: StepBuilder,
    stops: StopChecker,
) -> None:
    """A task for each beam group; those before it may have a say in which of its candidates are the best."""
    params, beams = group.params, group.sequences
    num_ends, num_penalised_beams = stops.num_end_tokens(params), 0
    for number, places in group.beam_groups():
        own = slice(places.start, places.stop)
        builder.beams.append(
            BeamTask(
                seq_indices=range(seq_indices[places[0]], seq_indices[places[-1]] + 1),
                params=params,
                scores=[seq.cumulative_logprob for seq in beams[own]],
                num_candidates=num_candidates(params.beams_per_group, num_ends, num_penalised_beams * len(places)),
                position=beams[0].num_output_tokens,  # beams keep step with each other
                histories=None if histories is None else histories[own],
                allowed=None if allowed is None else allowed[own],
                beam_group=number,
            )
        )
        builder.searchers.append(group)
        if params.diversity_penalty:
            num_penalised_beams += params.beams_per_group

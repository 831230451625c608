"""The step under construction: what `schedule` has decided so far. Becomes the frozen `SchedulerOutput`."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagedbatch.sequence import Sequence, SequenceGroup, Source
from pagedbatch.step import (
    BeamTask,
    BlockCopy,
    PromptTask,
    SampleTask,
    ScheduledSequence,
    ScheduledSource,
    SchedulerOutput,
)


@dataclass(slots=True)
class StepBuilder:
    """Budgets left and decisions taken.

    `samplers`, `searchers` and `scored` name who owns the tasks in `samples`, `beams` and `prompts`, in the same order,
    for `update`. `scores_left` is how many more positions of prompts may be scored.
    """

    tokens_left: int
    scores_left: int
    sequences: list[ScheduledSequence] = field(default_factory=list)
    samples: list[SampleTask] = field(default_factory=list)
    beams: list[BeamTask] = field(default_factory=list)
    samplers: list[Sequence] = field(default_factory=list)
    searchers: list[SequenceGroup] = field(default_factory=list)
    prompts: list[PromptTask] = field(default_factory=list)
    scored: list[SequenceGroup] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    swap_out: list[BlockCopy] = field(default_factory=list)
    swap_in: list[BlockCopy] = field(default_factory=list)
    sources: list[ScheduledSource] = field(default_factory=list)
    num_tokens: int = 0
    num_source_tokens: int = 0
    """Tokens of sources to encode, beside `num_tokens`."""
    swapped_out: list[SequenceGroup] = field(default_factory=list)
    broken: list[SequenceGroup] = field(default_factory=list)
    """Groups whose own data raised an error while the step was planned."""
    short_of_blocks: bool = False
    """A group was preempted or had to wait for blocks: nobody is admitted in this step."""

    def add(self, scheduled: ScheduledSequence) -> int:
        """Takes a sequence in and returns its index in the step."""
        self.sequences.append(scheduled)
        self.num_tokens += len(scheduled.token_ids)
        self.tokens_left -= len(scheduled.token_ids)
        return len(self.sequences) - 1

    def read_source(self, seq_index: int, source: Source, block_table: list[int]) -> None:
        """Sequence `seq_index` reads a source, maybe as the one before it does; encodes what is not encoded yet."""
        last = self.sources[-1] if self.sources else None
        if last is not None and last.block_table is block_table:
            self.sources[-1] = last._replace(readers=range(last.readers.start, seq_index + 1))
            return
        new = None if source.is_encoded else source.token_ids
        self.sources.append(ScheduledSource(range(seq_index, seq_index + 1), len(source.token_ids), block_table, new))
        if new is not None:
            self.num_source_tokens += len(new)
            source.is_encoded = True

    def build(self, step: int) -> SchedulerOutput:
        return SchedulerOutput(
            step=step,
            sequences=self.sequences,
            samples=self.samples,
            beams=self.beams,
            copies=self.copies,
            swap_out=self.swap_out,
            swap_in=self.swap_in,
            num_tokens=self.num_tokens,
            prompts=self.prompts,
            sources=self.sources,
        )

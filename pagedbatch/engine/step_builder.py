"""The step under construction: what `schedule` has decided so far. Becomes the frozen `SchedulerOutput`."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagedbatch.sequence import Sequence, SequenceGroup
from pagedbatch.step import BeamTask, BlockCopy, PromptTask, SampleTask, ScheduledSequence, SchedulerOutput


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
    num_tokens: int = 0
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
        )

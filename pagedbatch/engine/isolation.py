"""Finds the request that makes a step fail: its groups are tried again, fewer at a time.

A failed step drew nothing, and no K/V that it touched is trusted: its groups compute them again, so that no output
changes. While groups are on trial the rest holds still. A trial that fails is split into halves; a group that fails
alone is to blame, after smaller steps where memory ran out. A group passes when it has done what the failed step was
to do.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagedbatch.engine.scheduler import Scheduler
from pagedbatch.engine.step_builder import StepBuilder
from pagedbatch.sequence import GroupState, SequenceGroup

_NO_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory")
#: After one of these the device answers nothing any more.
_FATAL = ("cuda error", "hip error", "device-side assert", "illegal memory access")


def is_out_of_memory(error: Exception) -> bool:
    """Whether less at a time may go well. Libraries have types of their own for this."""
    return isinstance(error, MemoryError) or any(words in str(error).lower() for words in _NO_MEMORY)


def is_fatal(error: Exception) -> bool:
    """Whether the device is lost, for any row."""
    return not is_out_of_memory(error) and any(words in str(error).lower() for words in _FATAL)


@dataclass(frozen=True, slots=True)
class _Suspect:
    """A group, and how many tokens of each of its sequences were computed after the step that is in question."""

    group: SequenceGroup
    goals: dict[int, int]

    @property
    def passed(self) -> bool:
        if self.group.state is GroupState.FINISHED:
            return True
        return all(seq.num_computed_tokens >= self.goals.get(seq.seq_id, 0) for seq in self.group.sequences)


@dataclass(slots=True)
class _Trial:
    """Groups that run without any others, and from nothing that others left in the pool."""

    suspects: list[_Suspect]
    max_num_tokens: int
    of_one: bool


@dataclass(slots=True)
class _Case:
    """A step that failed, until all that was in it is cleared up."""

    num_tokens: int
    was_out_of_memory: bool
    found_culprit: bool = False


class Isolation:
    """Says which groups the scheduler may serve next, and which of them is to blame."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._max_num_tokens = scheduler.max_num_tokens
        self._trials: list[_Trial] = []  # the last one is on
        self._on: _Trial | None = None
        self._case: _Case | None = None
        self._num_unexplained = 0

    @property
    def tries_one(self) -> bool:
        """Whether the next step serves one group alone, that nothing of any other can have touched."""
        return self._on is not None and self._on.of_one

    def step_failed(self, builder: StepBuilder, error: Exception) -> SequenceGroup | None:
        """Takes a step back. Returns the group that is to blame for it, out of the queues, once it is known."""
        scheduler, trial = self._scheduler, self._on
        suspects = [_suspect(group) for group in scheduler.groups_in(builder)]
        scheduler.roll_back(builder)
        if self._case is None:
            self._case = _Case(builder.num_tokens + builder.num_source_tokens, is_out_of_memory(error))
        culprit = None
        if trial is None:
            self._add(suspects)
        else:
            self._trials.pop()
            in_step = {suspect.group.arrival for suspect in suspects}
            self._add([suspect for suspect in trial.suspects if suspect.group.arrival not in in_step])
            smaller = max(len(suspects[0].group.sequences), builder.num_tokens // 2)
            if len(suspects) > 1:
                self._add(suspects[len(suspects) // 2 :])
                self._add(suspects[: len(suspects) // 2])
            elif is_out_of_memory(error) and smaller < builder.num_tokens:
                self._add(suspects, smaller)
            else:
                culprit = suspects[0].group
                self._case.found_culprit = True
                scheduler.give_up(culprit)
        self._go_on()
        return culprit

    def doubt(self, groups: list[SequenceGroup], beside: list[SequenceGroup]) -> None:
        """Tries each of these running groups alone and from the start: what went wrong may be another's doing.

        Those `beside` them in the step gave no result yet that would show it: they start again, too.
        """
        suspects = [_suspect(group) for group in groups]
        self._scheduler.start_again(groups + beside)
        for suspect in reversed(suspects):
            self._add([suspect])
        self._go_on()

    def step_succeeded(self) -> None:
        """Lets those on trial go that have done what was in question."""
        if self._on is not None:
            self._go_on()

    def _add(self, suspects: list[_Suspect], max_num_tokens: int | None = None) -> None:
        """A trial to be held before those that there are."""
        if suspects:
            self._trials.append(_Trial(suspects, max_num_tokens or self._max_num_tokens, of_one=len(suspects) == 1))

    def _go_on(self) -> None:
        """Restricts the scheduler to the trial that is on now, or to none."""
        while self._trials:
            trial = self._trials[-1]
            trial.suspects = [suspect for suspect in trial.suspects if not suspect.passed]
            if trial.suspects:
                break
            self._trials.pop()
        else:
            self._close_case()
            trial = None
        if trial is not self._on:
            self._scheduler.forget_contents()
        self._on = trial
        if trial is None:
            self._scheduler.restrict_to(None, self._max_num_tokens)
        else:
            self._scheduler.restrict_to([suspect.group for suspect in trial.suspects], trial.max_num_tokens)

    def _close_case(self) -> None:
        """Nobody is on trial. Where nobody was to blame, it may have been too much at once."""
        case, self._case = self._case, None
        if case is None or case.found_culprit:
            return
        if case.was_out_of_memory or self._num_unexplained:
            self._max_num_tokens = max(1, case.num_tokens // 2)
        self._num_unexplained += 1


def _suspect(group: SequenceGroup) -> _Suspect:
    return _Suspect(group, {seq.seq_id: seq.num_computed_tokens for seq in group.sequences})

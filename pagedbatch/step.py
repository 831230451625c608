"""What crosses between the engine and the runner in one step. Ids and numbers only.

Those that are made for every sequence in every step are named tuples: a frozen dataclass takes twice as long to make.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from pagedbatch.constraint import Allowed
from pagedbatch.params import GenerationParams

#: The most likely tokens of one position: (token id, logprob), best first.
TopLogprobs = list[tuple[int, float]]


class BlockCopy(NamedTuple):
    """Copy a whole block, all layers, K and V, from one block id to another."""

    src: int
    dst: int


class ScheduledSequence(NamedTuple):
    """A run of tokens of one sequence to compute in this step.

    `token_ids` are the query tokens; `context_len` tokens before them are in the pool already or are computed in
    the same step by a sequence that shares the blocks. `block_table` covers `context_len + len(token_ids)` tokens; it
    is the manager's own list, valid during the step and not to be changed.
    """

    seq_id: int
    token_ids: list[int]
    context_len: int
    block_table: list[int]


class ScheduledSource(NamedTuple):
    """A source that an encoder-decoder's sequences read across: its cross-attention K/V lie in `block_table`.

    The scheduled sequences `readers` attend to all of its `num_tokens` tokens. `token_ids` is given where the source
    must be encoded in this step, before anyone reads it.
    """

    readers: range
    num_tokens: int
    block_table: list[int]
    token_ids: list[int] | None


@dataclass(frozen=True, slots=True)
class History:
    """The tokens so far of one sequence, for controls that look back."""

    prompt_token_ids: list[int]
    output_token_ids: list[int]


class SampleTask(NamedTuple):
    """Draw one token for each of `sample_indices` from the last position of scheduled sequence `seq_index`.

    There is more than one index only at the first position of a group with n > 1. `position` counts generated tokens.
    `allowed` is what the row's constraint leaves; None: anything.
    """

    seq_index: int
    params: GenerationParams
    rng_key: int
    sample_indices: tuple[int, ...]
    position: int
    history: History | None = None
    allowed: Allowed | None = None


@dataclass(frozen=True, slots=True)
class BeamTask:
    """Rank the continuations of the beams in scheduled sequences `seq_indices`, whose summed logprobs are `scores`.

    A request has a task for each `beam_group` that still searches, in order. At the first position all of them start
    from the prompt's sequence.
    """

    seq_indices: range
    params: GenerationParams
    scores: list[float]
    num_candidates: int
    position: int
    histories: list[History] | None = None
    allowed: list[Allowed | None] | None = None
    beam_group: int = 0


@dataclass(frozen=True, slots=True)
class PromptTask:
    """Say how likely the model found `targets`, tokens of a prompt that follow each other, and what was likeliest.

    The first target comes after token `first` of those that scheduled sequence `seq_index` computes in this step.
    """

    seq_index: int
    first: int
    targets: list[int]
    num_top: int


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step for the runner: first `swap_out`, then `swap_in`, then `copies`, then one forward of `sequences`."""

    step: int
    sequences: list[ScheduledSequence]
    samples: list[SampleTask]
    beams: list[BeamTask]
    copies: list[BlockCopy]
    swap_out: list[BlockCopy]
    swap_in: list[BlockCopy]
    num_tokens: int
    prompts: list[PromptTask] = field(default_factory=list)
    sources: list[ScheduledSource] = field(default_factory=list)


class SampleResult(NamedTuple):
    """What a `SampleTask` drew: one entry a sample index, or none where its constraint leaves nothing to draw.

    `error` is set when the row's logits are not numbers.
    """

    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[TopLogprobs] | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class BeamResult:
    """The best continuations of a beam group, best first.

    `parents` index into the task's `seq_indices`; `scores` are the summed (processed) logprobs, the new token's
    included; `logprobs` are the new token's own. Fewer than asked come back when fewer are possible.
    `top_logprobs` has one entry per parent.
    """

    parents: list[int]
    token_ids: list[int]
    scores: list[float]
    logprobs: list[float]
    top_logprobs: list[TopLogprobs] | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class PromptScores:
    """The raw logprobs of prompt tokens that follow each other, and the most likely tokens in place of each.

    Those of a whole prompt leave its first token out: nothing comes before it. `error` is as in `SampleResult`.
    """

    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    error: str | None = None

    def extend(self, more: PromptScores) -> None:
        self.logprobs.extend(more.logprobs)
        self.top_logprobs.extend(more.top_logprobs)


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Where a step's time went on the runner's side. `model` excludes `attention`; `swap` is a part of it."""

    model: float = 0.0
    attention: float = 0.0
    sampling: float = 0.0
    swap: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """Results in the order of the step's tasks."""

    samples: list[SampleResult]
    beams: list[BeamResult]
    seconds: StepSeconds = StepSeconds()
    prompts: list[PromptScores] = field(default_factory=list)

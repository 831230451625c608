"""A request and the sequences it becomes: plain state, changed only by the scheduler."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import accumulate, islice

from pagedbatch.constraint import Constraint, ConstraintState
from pagedbatch.params import GenerationParams
from pagedbatch.step import PromptScores, TopLogprobs


@dataclass(frozen=True, slots=True)
class Thinking:
    """The tags around the thinking part of a row's outputs. `is_open`: the prompt has written the opening one."""

    opening: str
    closing: str
    is_open: bool


@dataclass(frozen=True, slots=True)
class Request:
    """One input row, tokenised and checked.

    `rng_key` is a 64-bit number made from the seed and the row's id: with a sample index and a position it alone
    decides every random draw of the row. Lower `priority` values run first. `num_truncated_tokens` were cut off the
    prompt. `thinking` None: outputs are answers as a whole.

    For an encoder-decoder `source_token_ids` is what the encoder reads, and `prompt_token_ids` what the decoder begins
    with: its start token and a target prefix. Decoders have no source.
    """

    request_id: int
    prompt_token_ids: list[int]
    params: GenerationParams
    rng_key: int = 0
    priority: int = 0
    constraint: Constraint | None = None
    num_truncated_tokens: int = 0
    thinking: Thinking | None = None
    source_token_ids: list[int] = field(default_factory=list)

    @property
    def num_input_tokens(self) -> int:
        """Tokens of the source, or of the prompt where there is none."""
        return len(self.source_token_ids or self.prompt_token_ids)

    @property
    def max_stored_tokens(self) -> int:
        """Maximum number of tokens whose K/V one of its sequences reads: of source, prompt and output."""
        return len(self.source_token_ids) + len(self.prompt_token_ids) + self.params.max_tokens

    @property
    def computes_nothing(self) -> bool:
        """Whether it is answered without a step: nothing to generate, and no prompt token to score."""
        scores_nothing = self.params.prompt_logprobs is None or len(self.prompt_token_ids) == 1
        return self.params.max_tokens == 0 and scores_nothing


class Source:
    """What the sequences of a group read across, and the id of its block table."""

    __slots__ = ("is_encoded", "seq_id", "token_ids")

    def __init__(self, seq_id: int, token_ids: list[int]) -> None:
        self.seq_id = seq_id
        self.token_ids = token_ids
        #: Whether its K/V are in the pool, or will be when the step is done that is being scheduled.
        self.is_encoded = False


class TokenNode:
    """One generated token and a pointer to the one before it.

    A fork shares its parent's whole history, so that a beam step costs one node a survivor whatever the length; what
    only dead beams knew is collected by the interpreter.
    """

    __slots__ = ("length", "logprob", "parent", "token_id", "top_logprobs")

    def __init__(
        self, token_id: int, logprob: float, parent: TokenNode | None, top_logprobs: TopLogprobs | None = None
    ) -> None:
        self.token_id = token_id
        self.logprob = logprob
        self.parent = parent
        self.top_logprobs = top_logprobs
        self.length: int = 1 if parent is None else parent.length + 1

    def backwards(self) -> Iterator[TokenNode]:
        """This node, then its ancestors up to the first generated token."""
        node: TokenNode | None = self
        while node is not None:
            yield node
            node = node.parent


def output_token_ids(node: TokenNode | None, last: int | None = None) -> list[int]:
    """The generated token ids up to `node`, or the `last` of them, in order."""
    if node is None:
        return []
    ids = [n.token_id for n in islice(node.backwards(), last)]
    ids.reverse()
    return ids


class Sequence:
    """One growing output of a group: its history, and how many of its tokens have K/V in the pool."""

    __slots__ = (
        "beam_group", "constraint", "cumulative_logprob", "group", "num_computed_tokens", "num_tokens",
        "peak_computed_tokens", "sample_index", "seq_id", "tail",
    )  # fmt: skip

    def __init__(self, seq_id: int, group: SequenceGroup, sample_index: int) -> None:
        self.seq_id = seq_id
        self.group = group
        #: Of prompt and output together.
        self.num_tokens = len(group.prompt_token_ids)
        self.sample_index = sample_index
        #: Which beams it is ranked against, once they are beams.
        self.beam_group = 0
        self.tail: TokenNode | None = None
        self.cumulative_logprob = 0.0
        self.num_computed_tokens = 0
        #: Maximum of `num_computed_tokens` so far: what lies below it and is computed again is recomputation.
        self.peak_computed_tokens = 0
        self.constraint: ConstraintState | None = None

    @property
    def num_output_tokens(self) -> int:
        return 0 if self.tail is None else self.tail.length

    def token_slice(self, start: int, stop: int) -> list[int]:
        """Token ids `[start, stop)` of prompt and output together."""
        prompt = self.group.prompt_token_ids
        if stop <= len(prompt):
            return prompt[start:stop]
        assert self.tail is not None
        if start == stop - 1 and stop == self.num_tokens:
            return [self.tail.token_id]  # a decode step: no walk
        first_output = max(start, len(prompt))
        outputs = output_token_ids(self.tail, last=self.num_tokens - first_output)
        return prompt[start:first_output] + outputs[: stop - first_output]

    def append(self, node: TokenNode) -> None:
        """Takes in the next generated token, which ended nothing."""
        self.tail = node
        self.num_tokens += 1
        if self.constraint is not None:
            self.constraint.advance(node.token_id)

    def fork(self, seq_id: int) -> Sequence:
        """A child with the same history; its block table is forked by the block manager."""
        child = Sequence(seq_id, self.group, self.sample_index)
        child.beam_group = self.beam_group
        child.tail = self.tail
        child.num_tokens = self.num_tokens
        child.cumulative_logprob = self.cumulative_logprob
        child.num_computed_tokens = self.num_computed_tokens
        child.peak_computed_tokens = self.peak_computed_tokens
        child.constraint = None if self.constraint is None else self.constraint.fork()
        return child


@dataclass(frozen=True, slots=True)
class FinishedSequence:
    """A complete output. `score`, the length-penalised sum, and `beam_group` are for beam hypotheses only."""

    sample_index: int
    tail: TokenNode
    cumulative_logprob: float
    finish_reason: str
    stop_reason: str | int | None
    score: float | None = None
    beam_group: int = 0

    @property
    def mean_logprob(self) -> float:
        """Over the generated tokens, the end token included."""
        return self.cumulative_logprob / self.tail.length


class GroupState(Enum):
    """The state of a group. Only RUNNING groups own device blocks."""

    WAITING = auto()
    RUNNING = auto()
    SWAPPED = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """The samples or beams of one request. They move together: admitted, sampled, preempted as one."""

    request: Request
    arrival: int
    #: Maximum number of sequences at once. Beams all run; samples beyond it wait.
    max_width: int
    sequences: list[Sequence] = field(default_factory=list)
    #: Samples that wait for another one to finish, each with its first token and without blocks.
    pending: deque[Sequence] = field(default_factory=deque)
    finished: list[FinishedSequence] = field(default_factory=list)
    state: GroupState = GroupState.WAITING
    source: Source | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    #: Maximum number of distinct blocks that the group held when it was preempted by recomputation.
    num_blocks_lost: int = 0
    search_is_over: bool = False
    #: Grows with the prompt's chunks, where the request asked for it.
    prompt_scores: PromptScores = field(default_factory=PromptScores)
    error: str | None = None
    # The request's own, asked several times a step.
    prompt_token_ids: list[int] = field(init=False)
    params: GenerationParams = field(init=False)
    #: Whether its draws look back.
    reads_history: bool = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_token_ids, self.params = self.request.prompt_token_ids, self.request.params
        self.reads_history = self.params.reads_history

    @property
    def order(self) -> tuple[int, int]:
        """Sort key of the queues: lower priority values first, then the older."""
        return (self.request.priority, self.arrival)

    @property
    def width(self) -> int:
        """Sequences that the group has, or will have once it first draws."""
        return self.max_width if self.sequences[0].tail is None else len(self.sequences)

    @property
    def num_scored(self) -> int:
        """Prompt positions that have said how likely the next token is."""
        return len(self.prompt_scores.logprobs)

    @property
    def num_unscored(self) -> int:
        """Prompt positions that must still do so. The last one never has to: it draws."""
        return 0 if self.params.prompt_logprobs is None else len(self.prompt_token_ids) - 1 - self.num_scored

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to compute."""
        if self.params.max_tokens == 0:
            return self.num_unscored == 0
        return self.search_is_over or not self.sequences

    @property
    def num_missing_tokens(self) -> int:
        """Tokens whose K/V must still be computed before the group can draw."""
        missing = 0
        for seq in self.sequences:  # every group in every step: no generator
            missing += seq.num_tokens - seq.num_computed_tokens
        return missing

    def beam_groups(self) -> list[tuple[int, range]]:
        """Each beam group that still searches: its number, and the positions of its beams in `sequences`.

        At the first position there is one sequence, from which all of them start.
        """
        if self.sequences[0].tail is None:
            return [(number, range(1)) for number in range(self.params.num_beam_groups)]
        sizes = Counter(seq.beam_group for seq in self.sequences)  # in order: beams of one group are neighbours
        stops = accumulate(sizes.values())
        return [(number, range(stop - size, stop)) for (number, size), stop in zip(sizes.items(), stops, strict=True)]

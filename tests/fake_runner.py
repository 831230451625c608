"""A runner without a model that still knows whether the pool is right.

Each slot of its pool stores the token that was written there. To draw, it reads a sequence back through its block
table and decides by a hash of what it read: a missing copy, a stale block or a wrong table changes the outputs.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

from pagedbatch.constraint import Allowed, AllowedMask
from pagedbatch.step import (
    BeamResult,
    BeamTask,
    ModelRunnerOutput,
    PromptScores,
    PromptTask,
    SampleResult,
    SampleTask,
    SchedulerOutput,
)


def _digest(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big")


class FakeRunner:
    """Executes steps over a pool of token ids. `vocab_size` small makes equal continuations, and ends, frequent."""

    def __init__(self, num_blocks: int, block_size: int, num_swap_blocks: int = 0, vocab_size: int = 11) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.pool: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.swap: list[list[int | None]] = [[None] * block_size for _ in range(num_swap_blocks)]
        self.steps: list[SchedulerOutput] = []

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self.steps.append(step)
        for src, dst in step.swap_out:
            self.swap[dst] = list(self.pool[src])
        for src, dst in step.swap_in:
            self.pool[dst] = list(self.swap[src])
        assert not {c.src for c in step.copies} & {c.dst for c in step.copies}
        for src, dst in step.copies:
            self.pool[dst] = list(self.pool[src])
        written: set[int] = set()
        for scheduled in step.sequences:
            assert scheduled.token_ids, "a row without tokens"
            for i, token in enumerate(scheduled.token_ids):
                position = scheduled.context_len + i
                block_id = scheduled.block_table[position // self.block_size]
                slot = block_id * self.block_size + position % self.block_size
                assert slot not in written, "two sequences write one slot in one step"
                written.add(slot)
                self.pool[block_id][position % self.block_size] = token
        read = [self._read(s.block_table, s.context_len + len(s.token_ids)) for s in step.sequences]
        return ModelRunnerOutput(
            samples=[self._draw(task, read[task.seq_index]) for task in step.samples],
            beams=[self._rank(task, [read[row] for row in task.seq_indices]) for task in step.beams],
            prompts=[
                self._score(task, step.sequences[task.seq_index].context_len, read[task.seq_index])
                for task in step.prompts
            ],
        )

    def _read(self, block_table: list[int], length: int) -> tuple[int | None, ...]:
        tokens = tuple(self.pool[block_table[p // self.block_size]][p % self.block_size] for p in range(length))
        assert None not in tokens, "a slot was read before it was written"
        return tokens

    def _choices(self, allowed: Allowed | None) -> Sequence[int]:
        """The tokens that may come, in order."""
        if allowed is None:
            return range(self.vocab_size)
        if isinstance(allowed, AllowedMask):
            return [i for i in range(self.vocab_size) if allowed.words[i // 32] >> i % 32 & 1]
        return sorted(allowed.token_ids.tolist())

    def _draw(self, task: SampleTask, tokens: tuple[int | None, ...]) -> SampleResult:
        choices = self._choices(task.allowed)
        if not choices:
            return SampleResult([], [])
        drawn = [choices[_digest(tokens, task.rng_key, i, task.position) % len(choices)] for i in task.sample_indices]
        return SampleResult(drawn, [-1.0 - token / 100 for token in drawn])

    def _score(self, task: PromptTask, context_len: int, tokens: tuple[int | None, ...]) -> PromptScores:
        """The logprob of a token is made from its place and from all that stands in the pool before it."""
        places = range(context_len + task.first + 1, context_len + task.first + 1 + len(task.targets))
        logprobs = [
            -(_digest(place, tokens[:place], target) % 1000) / 100
            for place, target in zip(places, task.targets, strict=True)
        ]
        return PromptScores(logprobs, [[(place, logprob)] for place, logprob in zip(places, logprobs, strict=True)])

    def _rank(self, task: BeamTask, beams: list[tuple[int | None, ...]]) -> BeamResult:
        candidates = []
        for parent, (tokens, score) in enumerate(zip(beams, task.scores, strict=True)):
            digest = hashlib.shake_128(repr(tokens).encode()).digest(2 * self.vocab_size)
            weights = [1 + int.from_bytes(digest[2 * i : 2 * i + 2]) % 1000 for i in range(self.vocab_size)]
            total = sum(weights)
            for token in self._choices(None if task.allowed is None else task.allowed[parent]):
                logprob = math.log(weights[token] / total)
                candidates.append((score + logprob, parent, token, logprob))
        candidates.sort(key=lambda c: (-c[0], c[1], c[2]))
        best = candidates[: task.num_candidates]
        return BeamResult([c[1] for c in best], [c[2] for c in best], [c[0] for c in best], [c[3] for c in best])

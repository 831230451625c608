"""What a step's results do to a group: tokens appended, children forked, the dead freed, outputs finished.

Fork before free, and the last child of a parent is the parent itself: no block is copied here, and none is lost that a
survivor still needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

from pagedbatch.engine import beam_search
from pagedbatch.engine.block_manager import BlockManager
from pagedbatch.engine.stopping import LENGTH, Finish, StopChecker
from pagedbatch.params import GenerationParams
from pagedbatch.sequence import FinishedSequence, Sequence, SequenceGroup, TokenNode
from pagedbatch.step import BeamResult, BeamTask, SampleResult, SampleTask


class _Move(NamedTuple):
    """A beam's next token: the parent that it comes from, and its summed logprob."""

    parent: Sequence
    node: TokenNode
    score: float
    beam_group: int


class GroupUpdater:
    """Applies results to groups. Owns only the means: block tables, stop rules and fresh sequence ids."""

    def __init__(self, blocks: BlockManager, stops: StopChecker, new_seq_id: Callable[[], int]) -> None:
        self._blocks = blocks
        self._stops = stops
        self._new_seq_id = new_seq_id

    def update_sample(self, seq: Sequence, task: SampleTask, result: SampleResult) -> None:
        """Gives a sequence its drawn token; at the first position of a group with n > 1, forks the other samples.

        Samples beyond the group's width wait, each with its first token; whenever one finishes, the next one starts in
        its place.
        """
        group, parent = seq.group, seq.tail
        if parent is not None and result.token_ids:  # the usual case: one sample, which goes on
            token_id, logprob = result.token_ids[0], result.logprobs[0]
            if self._stops.check(task.params, parent, token_id) is None:
                top = None if result.top_logprobs is None else result.top_logprobs[0]
                seq.append(TokenNode(token_id, logprob, parent, top))
                seq.cumulative_logprob += logprob
                return
        grown: list[tuple[int, TokenNode]] = []
        for i, (token_id, logprob) in enumerate(zip(result.token_ids, result.logprobs, strict=True)):
            top = result.top_logprobs[i] if result.top_logprobs is not None else None
            node = TokenNode(token_id, logprob, parent, top)
            finish = self._stops.check(task.params, parent, token_id)
            if finish is None:
                grown.append((task.sample_indices[i], node))
            else:
                total = seq.cumulative_logprob + logprob
                group.finished.append(
                    FinishedSequence(task.sample_indices[i], node, total, finish.reason, finish.stop_reason)
                )
        if not grown and group.pending:
            grown_children, children = [], [self._start_pending(seq)]
        else:
            waiting = [seq.fork(self._new_seq_id()) for _ in grown[group.max_width :]]
            children = self._fork_and_free([seq], [seq] * len(grown[: group.max_width]))
            grown_children = children + waiting
            group.pending.extend(waiting)
        if children != [seq]:
            at = group.sequences.index(seq)
            group.sequences[at : at + 1] = children
        for child, (sample_index, node) in zip(grown_children, grown, strict=True):
            child.sample_index = sample_index
            child.append(node)
            child.cumulative_logprob += node.logprob

    def _start_pending(self, finished: Sequence) -> Sequence:
        """The next waiting sample, on the prompt's blocks of one that has finished.

        Where some of those have left the attention window, it starts without blocks and finds or computes them.
        """
        sample = finished.group.pending.popleft()
        if self._blocks.is_whole(finished.seq_id):
            sample.num_computed_tokens = len(finished.group.prompt_token_ids)
            self._blocks.transfer_table(finished.seq_id, sample.seq_id, sample.num_computed_tokens)
        else:
            sample.num_computed_tokens = 0
            self._blocks.free(finished.seq_id)
        return sample

    def update_beams(self, group: SequenceGroup, tasks: list[BeamTask], results: list[BeamResult]) -> bool:
        """Ranks the candidates of one beam group after the other and moves the beams. True when the search is over."""
        params, beams = group.params, group.sequences
        wanted = beam_search.num_candidates(params.beams_per_group, self._stops.num_end_tokens(params))
        taken: Counter[int] = Counter()  # tokens that earlier beam groups went on with
        moves: list[_Move] = []
        for task, result in zip(tasks, results, strict=True):
            if params.diversity_penalty:
                result = beam_search.diversify(result, taken, params.diversity_penalty, wanted)
            if params.merge_end_tokens:
                result = beam_search.merge_ends(result, self._stops.end_tokens(params))
            first = task.seq_indices.start - tasks[0].seq_indices.start
            moves += self._search(group, task, beams[first : first + len(task.seq_indices)], result, taken)
        group.finished.sort(key=_score, reverse=True)
        group.sequences = self._fork_and_free(beams, [move.parent for move in moves])
        for beam, move in zip(group.sequences, moves, strict=True):
            beam.beam_group = move.beam_group
            beam.append(move.node)
            beam.cumulative_logprob = move.score
        return not moves

    def _search(
        self, group: SequenceGroup, task: BeamTask, beams: list[Sequence], result: BeamResult, taken: Counter[int]
    ) -> list[_Move]:
        """A beam group's step: files its new hypotheses and returns its survivors, best first.

        Adds to `taken` the tokens that it goes on with; it does at the length limit too.
        """
        params, number, width = task.params, task.beam_group, task.params.beams_per_group
        finishes = self._finishes(params, beams, result)
        goes_on = (token_id for token_id, f in zip(result.token_ids, finishes, strict=False) if f in (None, LENGTH))
        taken.update(islice(goes_on, width))
        hypotheses_before = [hypothesis for hypothesis in group.finished if hypothesis.beam_group == number]
        step = beam_search.select(
            params,
            scores=result.scores,
            ends=[finish is not None for finish in finishes],
            hypothesis_scores=[_score(hypothesis) for hypothesis in hypotheses_before],
            length=task.position + 1,
            max_length=params.max_tokens,
        )

        def grow(i: int) -> TokenNode:
            top = result.top_logprobs[result.parents[i]] if result.top_logprobs is not None else None
            return TokenNode(result.token_ids[i], result.logprobs[i], beams[result.parents[i]].tail, top)

        hypotheses = [hypothesis for hypothesis in group.finished if hypothesis.beam_group != number]
        hypotheses += [hypotheses_before[i] for i in step.kept]
        for i, score in zip(step.finished, step.finished_scores, strict=True):
            finish = finishes[i] or LENGTH
            hypotheses.append(
                FinishedSequence(0, grow(i), result.scores[i], finish.reason, finish.stop_reason, score, number)
            )
        group.finished = hypotheses
        survivors = [] if step.done else step.survivors
        return [_Move(beams[result.parents[i]], grow(i), result.scores[i], number) for i in survivors]

    def _finishes(self, params: GenerationParams, beams: list[Sequence], result: BeamResult) -> list[Finish | None]:
        """Why each candidate ends, the best first, up to the last one that can live on."""
        finishes: list[Finish | None] = []
        survivors = 0
        for parent, token_id in zip(result.parents, result.token_ids, strict=True):
            if survivors == params.beams_per_group:
                break
            finish = self._stops.check(params, beams[parent].tail, token_id)
            finishes.append(finish)
            survivors += finish is None
        return finishes

    def _fork_and_free(self, generation: list[Sequence], parents: list[Sequence]) -> list[Sequence]:
        """One child for each entry of `parents`, in order; members of `generation` without a child are freed."""
        if generation == parents:  # the usual case
            return parents
        children_left = Counter(parent.seq_id for parent in parents)
        dead = [seq.seq_id for seq in generation if seq.seq_id not in children_left]
        children = []
        for parent in parents:
            children_left[parent.seq_id] -= 1
            if children_left[parent.seq_id] == 0:
                children.append(parent)
                continue
            child = parent.fork(self._new_seq_id())
            if dead:
                self._blocks.replace_with_fork(parent.seq_id, child.seq_id, dead.pop())
            else:
                self._blocks.fork(parent.seq_id, child.seq_id)
            children.append(child)
        for seq_id in dead:
            self._blocks.free(seq_id)
        return children


def _score(hypothesis: FinishedSequence) -> float:
    assert hypothesis.score is not None
    return hypothesis.score

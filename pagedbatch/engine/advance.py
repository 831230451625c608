"""What a step's results do to a group: tokens appended, children forked, the dead freed, outputs finished.

Fork before free, and the last child of a parent is the parent itself: no block is copied here, and none is lost that a
survivor still needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from pagedbatch.engine import beam_search
from pagedbatch.engine.block_manager import BlockManager
from pagedbatch.engine.stopping import LENGTH, StopChecker
from pagedbatch.outputs import BeamResult, BeamTask, SampleResult, SampleTask
from pagedbatch.sequence import FinishedSequence, Sequence, SequenceGroup, TokenNode


class GroupAdvancer:
    """Applies results to groups. Owns only the means: block tables, stop rules and fresh sequence ids."""

    def __init__(self, blocks: BlockManager, stops: StopChecker, new_seq_id: Callable[[], int]) -> None:
        self._blocks = blocks
        self._stops = stops
        self._new_seq_id = new_seq_id

    def advance_sample(self, seq: Sequence, task: SampleTask, result: SampleResult) -> None:
        """Gives a sequence its drawn token; at the first position of a group with n > 1, forks the other samples.

        Samples beyond the group's width wait, each with its first token; whenever one finishes, the next one starts in
        its place.
        """
        group, parent = seq.group, seq.tail
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
            children = [self._succeed(seq)]
        else:
            waiting = [seq.fork(self._new_seq_id()) for _ in grown[group.max_width :]]
            children = self._descend([seq], [seq] * len(grown[: group.max_width]))
            for child, (sample_index, node) in zip(children + waiting, grown, strict=True):
                child.sample_index = sample_index
                child.append(node)
                child.cumulative_logprob += node.logprob
            group.pending.extend(waiting)
        if children != [seq]:
            at = group.sequences.index(seq)
            group.sequences[at : at + 1] = children

    def _succeed(self, finished: Sequence) -> Sequence:
        """The next waiting sample, on the prompt's blocks of one that has finished.

        Where some of those have left the attention window, it starts without blocks and finds or computes them.
        """
        heir = finished.group.pending.popleft()
        if self._blocks.is_whole(finished.seq_id):
            heir.num_computed_tokens = len(finished.group.prompt_token_ids)
            self._blocks.hand_over(finished.seq_id, heir.seq_id, heir.num_computed_tokens)
        else:
            heir.num_computed_tokens = 0
            self._blocks.free(finished.seq_id)
        return heir

    def advance_beams(self, group: SequenceGroup, task: BeamTask, result: BeamResult) -> bool:
        """Ranks the candidates and moves the beams. True when the search is over."""
        beams = group.sequences
        parents = [beams[row] for row in result.parents]
        finishes = [
            self._stops.check(task.params, parent.tail, token_id)
            for parent, token_id in zip(parents, result.token_ids, strict=True)
        ]
        step = beam_search.select(
            task.params,
            scores=result.scores,
            ends=[finish is not None for finish in finishes],
            standing=[_score(hypothesis) for hypothesis in group.finished],
            length=task.position + 1,
            max_length=task.params.max_tokens,
        )

        def grow(i: int) -> TokenNode:
            top = result.top_logprobs[result.parents[i]] if result.top_logprobs is not None else None
            return TokenNode(result.token_ids[i], result.logprobs[i], parents[i].tail, top)

        hypotheses = [group.finished[i] for i in step.kept]
        for i, score in zip(step.finished, step.finished_scores, strict=True):
            finish = finishes[i] or LENGTH
            hypotheses.append(FinishedSequence(0, grow(i), result.scores[i], finish.reason, finish.stop_reason, score))
        group.finished = sorted(hypotheses, key=_score, reverse=True)
        if step.done:
            return True
        grown = [grow(i) for i in step.survivors]
        group.sequences = self._descend(beams, [parents[i] for i in step.survivors])
        for beam, node, i in zip(group.sequences, grown, step.survivors, strict=True):
            beam.append(node)
            beam.cumulative_logprob = result.scores[i]
        return False

    def _descend(self, generation: list[Sequence], parents: list[Sequence]) -> list[Sequence]:
        """One child for each entry of `parents`, in order; members of `generation` without a child are freed."""
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
                self._blocks.fork_over(parent.seq_id, child.seq_id, dead.pop())
            else:
                self._blocks.fork(parent.seq_id, child.seq_id)
            children.append(child)
        for seq_id in dead:
            self._blocks.free(seq_id)
        return children


def _score(hypothesis: FinishedSequence) -> float:
    assert hypothesis.score is not None
    return hypothesis.score

"""From logits to token ids: one batched pass over the rows of a step. Knows no sequence, block or queue."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagedbatch.model.philox import uniforms
from pagedbatch.model.processors import changes_scores, process_row
from pagedbatch.model.truncation import keep_likely
from pagedbatch.outputs import BeamResult, BeamTask, SampleResult, SampleTask, SchedulerOutput, TopLogprobs

NOT_NUMBERS = "the model's logits are not finite numbers (NaN or infinity) at this position"


@dataclass(frozen=True, slots=True)
class Scored:
    """Raw logits of the rows that need a token, and their log-normalisers."""

    logits: Tensor  #: float32 [num_rows, vocab_size]
    normalisers: Tensor  #: float32 [num_rows], logsumexp of each row
    is_finite: list[bool]


class Sampler:
    """Draws for the sample tasks and ranks for the beam tasks of a step."""

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos_token_ids = eos_token_ids

    def __call__(self, logits: Tensor, step: SchedulerOutput) -> tuple[list[SampleResult], list[BeamResult]]:
        """
        Args:
            logits: [num_rows, vocab_size], rows in the order of `input_batch.rows_needed(step)`.
            step: the tasks.
        """
        logits = logits.float()
        normalisers = logits.logsumexp(dim=-1)
        scored = Scored(logits, normalisers, torch.isfinite(normalisers).tolist())
        num_samples = len(step.samples)
        samples = self._sample(step.samples, scored) if step.samples else []
        beams, row = [], num_samples
        for task in step.beams:
            beams.append(self._rank(task, scored, range(row, row + len(task.rows))))
            row += len(task.rows)
        return samples, beams

    # --- samples -------------------------------------------------------------------------------------------------

    def _sample(self, tasks: list[SampleTask], scored: Scored) -> list[SampleResult]:
        raw = scored.logits[: len(tasks)]
        scores = self._processed(tasks, raw)
        row_of_draw = np.repeat(np.arange(len(tasks)), [len(task.sample_indices) for task in tasks])
        drawn = self._draw(tasks, scores, row_of_draw)

        rows = torch.from_numpy(row_of_draw).to(raw.device)
        logprobs = (raw[rows, drawn] - scored.normalisers[rows]).tolist()
        token_ids = drawn.tolist()
        tops = _top_logprobs([task.params.logprobs for task in tasks], raw, scored.normalisers[: len(tasks)])
        results, start = [], 0
        for i, task in enumerate(tasks):
            stop = start + len(task.sample_indices)
            top = tops[i]
            results.append(
                SampleResult(
                    token_ids=token_ids[start:stop],
                    logprobs=logprobs[start:stop],
                    top_logprobs=None if top is None else [top] * (stop - start),
                    error=None if scored.is_finite[i] else NOT_NUMBERS,
                )
            )
            start = stop
        return results

    def _processed(self, tasks: list[SampleTask], raw: Tensor) -> Tensor:
        """The scores after every control, in a new tensor if any control changes them."""
        changed = [i for i, task in enumerate(tasks) if changes_scores(task.params, task.position)]
        if not changed:
            return raw
        scores = raw.clone()
        for i in changed:
            task = tasks[i]
            process_row(scores[i], task.params, task.position, task.history, self._eos_token_ids)
        return scores

    def _draw(self, tasks: list[SampleTask], scores: Tensor, row_of_draw: np.ndarray) -> Tensor:
        """Token ids [num_draws], int64: the most likely at temperature 0, else drawn."""
        is_random = np.array([task.params.temperature > 0 for task in tasks])
        drawn = scores.argmax(dim=-1)[torch.from_numpy(row_of_draw).to(scores.device)]
        if not is_random.any():
            return drawn
        random_rows = np.flatnonzero(is_random)
        weights = self._weights([tasks[i] for i in random_rows], scores[torch.from_numpy(random_rows)])

        draws = np.flatnonzero(is_random[row_of_draw])
        keys = np.array([tasks[row_of_draw[d]].rng_key for d in draws], np.uint64)
        indices = np.concatenate([tasks[i].sample_indices for i in random_rows]).astype(np.uint64)
        positions = np.array([tasks[row_of_draw[d]].position for d in draws], np.uint64)
        points = torch.from_numpy(uniforms(keys, indices, positions)).to(scores.device)
        row_of_weights = torch.from_numpy(np.searchsorted(random_rows, row_of_draw[draws])).to(scores.device)
        drawn[torch.from_numpy(draws).to(scores.device)] = invert_cdf(weights, row_of_weights, points)
        return drawn

    @staticmethod
    def _weights(tasks: list[SampleTask], scores: Tensor) -> Tensor:
        """Unnormalised probabilities [num_rows, vocab_size] after temperature, top-k, top-p and min-p."""

        def column(name: str) -> Tensor:
            values = [getattr(task.params, name) for task in tasks]
            return torch.tensor(values, dtype=torch.float32, device=scores.device).unsqueeze(1)

        weights = torch.softmax(scores / column("temperature"), dim=-1)
        top_k = [task.params.top_k if task.params.top_k > 0 else weights.shape[1] for task in tasks]
        weights = keep_likely(weights, top_k, [task.params.top_p for task in tasks])
        if any(task.params.min_p > 0 for task in tasks):
            floor = weights.amax(dim=-1, keepdim=True) * column("min_p")
            weights = weights.masked_fill(weights < floor, 0.0)
        return weights

    # --- beams ---------------------------------------------------------------------------------------------------

    def _rank(self, task: BeamTask, scored: Scored, rows: range) -> BeamResult:
        """The best continuations of one group's beams, all beams ranked jointly by summed logprob."""
        if not all(scored.is_finite[row] for row in rows):
            return BeamResult([], [], [], [], error=NOT_NUMBERS)
        here = slice(rows.start, rows.stop)
        raw, normalisers = scored.logits[here], scored.normalisers[here]
        logprobs = raw - normalisers.unsqueeze(1)
        if changes_scores(task.params, task.position):
            for i, row in enumerate(logprobs):
                history = None if task.histories is None else task.histories[i]
                process_row(row, task.params, task.position, history, self._eos_token_ids)
        sums = logprobs + torch.tensor(task.scores, dtype=torch.float32, device=raw.device).unsqueeze(1)
        best = sums.flatten().topk(min(task.num_candidates, sums.numel()))
        possible = torch.isfinite(best.values)  # a control may rule continuations out altogether
        flat = best.indices[possible]
        return BeamResult(
            parents=(flat // raw.shape[1]).tolist(),
            token_ids=(flat % raw.shape[1]).tolist(),
            scores=best.values[possible].tolist(),
            logprobs=logprobs.flatten()[flat].tolist(),
            top_logprobs=_all_or_none(_top_logprobs([task.params.logprobs] * len(rows), raw, normalisers)),
        )


def invert_cdf(weights: Tensor, rows: Tensor, points: Tensor) -> Tensor:
    """For each draw, the token at which the running sum of its row's weights passes `point * total`.

    Summed in vocabulary order, in float64, over spans first and then within one span: the vocabulary is read once and
    never sorted. Vocabulary order keeps a draw stable when two weights are nearly equal.

    Args:
        weights: float32 [num_rows, vocab_size], not negative.
        rows: int64 [num_draws], the row of each draw.
        points: float64 [num_draws] in [0, 1).

    Returns:
        int64 [num_draws], token ids of positive weight.
    """
    span = 256
    padding = -weights.shape[1] % span
    padded = torch.nn.functional.pad(weights, (0, padding)) if padding else weights
    spans = padded.view(weights.shape[0], -1, span)
    span_ends = spans.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)[rows]
    targets = (points * span_ends[:, -1]).unsqueeze(1)
    # right=True skips what has no weight: the first running sum strictly above the target.
    chosen = torch.searchsorted(span_ends, targets, right=True).clamp_(max=span_ends.shape[1] - 1)
    before = torch.where(chosen > 0, span_ends.gather(1, (chosen - 1).clamp_(min=0)), 0.0)
    within = spans[rows, chosen.squeeze(1)].double()
    ends = before + within.cumsum(dim=-1)
    offset = torch.searchsorted(ends, targets, right=True)
    # Rounding may leave the target at the very end of the span: then the last token with weight is meant.
    position = torch.arange(span, device=weights.device)
    last = torch.where(within > 0, position, -1).amax(dim=-1, keepdim=True)
    return (chosen * span + torch.minimum(offset, last)).squeeze(1)


def _top_logprobs(wanted: list[int | None], raw: Tensor, normalisers: Tensor) -> list[TopLogprobs | None]:
    """The most likely tokens of each row that asked for them, raw (before every control)."""
    asked = [i for i, count in enumerate(wanted) if count is not None]
    tops: list[TopLogprobs | None] = [None] * len(wanted)
    if not asked:
        return tops
    most = max(wanted[i] or 0 for i in asked)
    index = torch.tensor(asked, device=raw.device)
    values, token_ids = raw[index].topk(most)
    logprobs = (values - normalisers[index].unsqueeze(1)).tolist()
    for i, ids, row in zip(asked, token_ids.tolist(), logprobs, strict=True):
        count = wanted[i]
        tops[i] = list(zip(ids[:count], row[:count], strict=True))
    return tops


def _all_or_none(tops: list[TopLogprobs | None]) -> list[TopLogprobs] | None:
    found = [top for top in tops if top is not None]
    return found or None

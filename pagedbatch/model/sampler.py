"""From logits to token ids: batched passes over the rows of a step. Knows no sequence, block or queue."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagedbatch.model.allowed import keep_allowed_
from pagedbatch.model.beam_ranking import beam_passes
from pagedbatch.model.logprobs import NOT_NUMBERS, list_top_logprobs, log_normalisers, top_logprobs
from pagedbatch.model.philox import uniforms
from pagedbatch.model.processors import changes_scores, process_row
from pagedbatch.model.selection import first_largest
from pagedbatch.model.transfer import Pass, run_passes, send
from pagedbatch.model.truncation import keep_likely_
from pagedbatch.outputs import BeamResult, SampleResult, SampleTask, SchedulerOutput

NOTHING_LEFT = "the row's settings leave no token to choose at this position"

#: Logits worked on at once. On a CPU they stay in its caches, where a pass costs a fraction; on a GPU this only bounds
#: the memory that a step needs.
_LOGITS_AT_ONCE_ON_CPU, _LOGITS_AT_ONCE = 2**20, 2**27
#: A divisor below this makes infinities of float32 logits, and all above it that is this small is greedy.
_LEAST_TEMPERATURE = 1e-30
_SPAN = 256


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
        at_once = _LOGITS_AT_ONCE_ON_CPU if logits.device.type == "cpu" else _LOGITS_AT_ONCE
        rows_at_once = max(1, at_once // logits.shape[1])
        num_samples = len(step.samples)
        passes: list[Pass[list[Any]]] = []
        for start in range(0, num_samples, rows_at_once):
            tasks = step.samples[start : start + rows_at_once]
            passes.append(self._sample(tasks, logits[start : start + len(tasks)].float()))
        passes += beam_passes(logits[num_samples:], step.beams, self._eos_token_ids, rows_at_once)
        results = list(chain.from_iterable(run_passes(passes)))
        return results[:num_samples], results[num_samples:]

    def _sample(self, tasks: list[SampleTask], raw: Tensor) -> Pass[list[SampleResult]]:
        probabilities = raw.softmax(dim=-1)
        normalisers = log_normalisers(raw, probabilities)
        are_numbers = torch.isfinite(normalisers)
        scores, have_choice = self._processed(tasks, raw, are_numbers)
        row_of_draw = np.repeat(np.arange(len(tasks)), [len(task.sample_indices) for task in tasks])
        if scores is raw and all(task.params.temperature == 1.0 for task in tasks):
            drawn = _drawn(tasks, probabilities, send(row_of_draw, torch.int64, raw.device))
        else:
            drawn = self._draw(tasks, scores, row_of_draw)

        rows = send(row_of_draw, torch.int64, raw.device)
        shown, normalisers = _shown(tasks, raw, normalisers, scores)
        drawn_logprobs = shown[rows, drawn] - normalisers[rows]
        counts = [task.params.logprobs for task in tasks]
        tops = top_logprobs(counts, shown, normalisers)
        del raw, scores, shown, probabilities  # large, and not needed while the other passes are under way
        token_ids, logprobs, numbers, choices, *listed = yield [drawn, drawn_logprobs, are_numbers, have_choice, *tops]

        results, start = [], 0
        rows_home = zip(tasks, list_top_logprobs(counts, listed), numbers, choices, strict=True)
        for task, top, is_number, has_choice in rows_home:
            stop = start + len(task.sample_indices)
            error = None if has_choice else NOTHING_LEFT if is_number else NOT_NUMBERS
            if error == NOTHING_LEFT and task.allowed is not None:  # a dead end
                results.append(SampleResult([], []))
            else:
                top_of_draws = None if top is None else [top] * (stop - start)
                results.append(SampleResult(token_ids[start:stop], logprobs[start:stop], top_of_draws, error))
            start = stop
        return results

    def _processed(self, tasks: list[SampleTask], raw: Tensor, are_numbers: Tensor) -> tuple[Tensor, Tensor]:
        """The scores after every control, in a new tensor if any control changes them; and who has a token to choose.

        A row without choice has harmless numbers instead, so that nothing below must think of it.
        """
        changed = [i for i, task in enumerate(tasks) if changes_scores(task.params, task.position)]
        constrained = [i for i, task in enumerate(tasks) if task.allowed is not None]
        scores, have_choice = raw, are_numbers
        if changed or constrained:
            scores = raw.clone()
            for i in changed:
                task = tasks[i]
                process_row(scores[i], task.params, task.position, task.history, self._eos_token_ids)
            keep_allowed_(scores, constrained, [task.allowed for task in tasks if task.allowed is not None])
            have_choice = torch.isfinite(scores.amax(dim=-1)) & are_numbers
        # On a CPU it is cheaper to look than to pass over the scores; on a GPU, looking means waiting.
        if raw.device.type == "cpu" and bool(have_choice.all()):
            return scores, have_choice
        return torch.where(have_choice.unsqueeze(1), scores, 0.0), have_choice

    def _draw(self, tasks: list[SampleTask], scores: Tensor, row_of_draw: np.ndarray) -> Tensor:
        """Token ids [num_draws], int64: the most likely at temperature 0, else drawn."""
        device = scores.device
        is_random = np.array([task.params.temperature > 0 for task in tasks])
        drawn = torch.empty(len(row_of_draw), dtype=torch.int64, device=device)
        for kind in (False, True):
            rows = np.flatnonzero(is_random == kind)
            if len(rows) == 0:
                continue
            draws = np.flatnonzero(is_random[row_of_draw] == kind)
            own = scores if len(rows) == len(tasks) else scores[send(rows, torch.int64, device)]
            row_of_own = send(np.searchsorted(rows, row_of_draw[draws]), torch.int64, device)
            if kind:
                random = [tasks[i] for i in rows]
                picked = _drawn(random, _probabilities(random, own), row_of_own)
            else:
                picked = first_largest(own)[row_of_own]  # the lowest id among equals
            drawn[send(draws, torch.int64, device)] = picked
        return drawn


def _drawn(tasks: list[SampleTask], probabilities: Tensor, rows: Tensor) -> Tensor:
    """A token for each sample index of each task, one after the other: int64 [num_draws].

    Args:
        tasks: one a row of `probabilities`, which are overwritten.
        rows: int64 [num_draws], the row of each draw.
    """
    weights = _weights_(tasks, probabilities)
    counters = [(task.rng_key, index, task.position) for task in tasks for index in task.sample_indices]
    keys, indices, positions = np.array(counters, np.uint64).T
    return invert_cdf(weights, rows, send(uniforms(keys, indices, positions), torch.float64, weights.device))


def _probabilities(tasks: list[SampleTask], scores: Tensor) -> Tensor:
    """Probabilities at each task's temperature: float32 like `scores` [num_tasks, vocab_size]."""
    temperatures = [max(task.params.temperature, _LEAST_TEMPERATURE) for task in tasks]
    return torch.softmax(scores / send(temperatures, torch.float32, scores.device).unsqueeze(1), dim=-1)


def _weights_(tasks: list[SampleTask], probabilities: Tensor) -> Tensor:
    """What each token weighs in the draw, in place of its probability, and not normalised."""
    return keep_likely_(
        probabilities,
        [task.params.top_k for task in tasks],
        [task.params.top_p for task in tasks],
        [task.params.min_p for task in tasks],
    )


def _shown(tasks: list[SampleTask], raw: Tensor, normalisers: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """The scores and normalisers that logprobs are read from: raw ones, but for rows that want processed ones.

    Processed logprobs are those of the distribution that was drawn from; at temperature 0, of the scores that the
    likeliest token was taken from.
    """
    wanted = [i for i, task in enumerate(tasks) if task.params.logprobs_mode == "processed"]
    if not wanted:
        return raw, normalisers
    shown, normalisers = raw.clone(), normalisers.clone()
    shown[wanted] = scores[wanted]
    random = [i for i in wanted if tasks[i].params.temperature > 0]
    if random:
        theirs = [tasks[i] for i in random]
        shown[random] = _weights_(theirs, _probabilities(theirs, scores[random])).log()
    normalisers[wanted] = shown[wanted].logsumexp(dim=-1)
    return shown, normalisers


def invert_cdf(weights: Tensor, rows: Tensor, points: Tensor) -> Tensor:
    """For each draw, the token at which the running sum of its row's weights passes `point * total`.

    Summed in vocabulary order, over spans first and then within one span: the vocabulary is read once and never sorted.
    Vocabulary order keeps a draw stable when two weights are nearly equal.

    Args:
        weights: float32 [num_rows, vocab_size], not negative, some positive in each row.
        rows: int64 [num_draws], the row of each draw.
        points: float64 [num_draws] in [0, 1).

    Returns:
        int64 [num_draws], token ids of positive weight.
    """
    padding = -weights.shape[1] % _SPAN
    padded = torch.nn.functional.pad(weights, (0, padding)) if padding else weights
    spans = padded.view(weights.shape[0], -1, _SPAN)
    span_ends = spans.sum(dim=-1).cumsum(dim=-1, dtype=torch.float64)[rows]
    # Below the total even for the largest point, 1 - 2**-53: that product never rounds up to it.
    targets = points.unsqueeze(1) * span_ends[:, -1:]
    # right=True skips what has no weight: the first running sum strictly above the target.
    chosen = torch.searchsorted(span_ends, targets, right=True)
    before = torch.where(chosen > 0, span_ends.gather(1, (chosen - 1).clamp(min=0)), 0.0)
    within = spans[rows, chosen.squeeze(1)].double()
    ends = before + within.cumsum(dim=-1)
    offset = torch.searchsorted(ends, targets, right=True)
    # The span's own sum may be rounded up a little above `ends`: then its last token with weight is meant.
    position = torch.arange(_SPAN, device=weights.device)
    last = torch.where(within > 0, position, -1).amax(dim=-1, keepdim=True)
    return (chosen * _SPAN + torch.minimum(offset, last)).squeeze(1)

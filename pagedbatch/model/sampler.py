"""From logits to token ids: batched passes over the rows of a step. Knows no sequence, block or queue."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import torch
from pagedbatch_kernels.sampling import Draws, SamplingOps
from torch import Tensor

from pagedbatch.model.beam_ranking import beam_device_tasks
from pagedbatch.model.logits_processors import apply_logits_processors, needs_logits_processors
from pagedbatch.model.logprobs import NOT_NUMBERS, list_top_logprobs, mask_padding_, to_supported_dtype, top_logprobs
from pagedbatch.model.philox import uniforms
from pagedbatch.model.token_mask import apply_token_mask_
from pagedbatch.model.torch_sampling import TorchSamplingOps, draws_at, truncated_probs
from pagedbatch.model.transfer import DeviceTask, run_device_tasks, to_device
from pagedbatch.step import BeamResult, SampleResult, SampleTask, SchedulerOutput

NOTHING_LEFT = "the row's settings leave no token to choose at this position"


class Sampler:
    """Draws for the sample tasks and ranks for the beam tasks of a step.

    Args:
        eos_token_ids: what may not come before `min_tokens`.
        sampling_ops: does the work on rows.
        num_token_ids: ids from here on are no tokens, and never chosen; None: all of the vocabulary are.
    """

    def __init__(
        self, eos_token_ids: frozenset[int], sampling_ops: SamplingOps | None = None, num_token_ids: int | None = None
    ) -> None:
        self._eos_token_ids = eos_token_ids
        self._num_token_ids = num_token_ids
        self._ops = TorchSamplingOps() if sampling_ops is None else sampling_ops

    def __call__(self, logits: Tensor, step: SchedulerOutput) -> tuple[list[SampleResult], list[BeamResult]]:
        """
        Args:
            logits: [batch_size, vocab_size], in the order of `input_batch.sampled_sequences(step)`; set to -infinity
                for ids that are no tokens.
            step: the tasks.
        """
        rows_at_once = self._ops.max_batch_size(logits)
        num_samples = len(step.samples)
        passes: list[DeviceTask[list[Any]]] = []
        for start in range(0, num_samples, rows_at_once):
            tasks = step.samples[start : start + rows_at_once]
            passes.append(self._sample(tasks, logits[start : start + len(tasks)]))
        passes += beam_device_tasks(
            logits[num_samples:], step.beams, self._eos_token_ids, self._ops, num_token_ids=self._num_token_ids
        )
        results = list(chain.from_iterable(run_device_tasks(passes)))
        return results[:num_samples], results[num_samples:]

    def _sample(self, tasks: list[SampleTask], logits: Tensor) -> DeviceTask[list[SampleResult]]:
        raw = to_supported_dtype(logits, self._ops)
        normalisers = self._ops.logsumexp(raw)
        are_numbers = torch.isfinite(normalisers)
        mask_padding_(raw, self._num_token_ids)
        scores, have_choice = self._processed(tasks, raw, are_numbers)
        draws = _draws(tasks)
        drawn = self._ops.draw(scores, draws)

        rows = to_device(draws.batch_indices, torch.int64, raw.device)
        shown, normalisers = _shown(tasks, raw, normalisers, scores, draws, drawn, self._ops)
        drawn_logprobs = shown[rows, drawn].float() - normalisers[rows]
        counts = [task.params.logprobs for task in tasks]
        tops = top_logprobs(counts, shown, normalisers, self._ops)
        del logits, raw, scores, shown  # large, and not needed while the other passes are under way
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
        """The scores after every control, in a new tensor of float32 if any control changes them; and who has a token
        to choose.

        A row without choice has harmless numbers instead, so that nothing below must think of it.
        """
        changed = [i for i, task in enumerate(tasks) if needs_logits_processors(task.params, task.position)]
        constrained = [i for i, task in enumerate(tasks) if task.allowed is not None]
        scores, have_choice = raw, are_numbers
        if changed or constrained:
            scores = raw.to(torch.float32, copy=True)
            for i in changed:
                task = tasks[i]
                apply_logits_processors(scores[i], task.params, task.position, task.history, self._eos_token_ids)
            apply_token_mask_(scores, constrained, [task.allowed for task in tasks if task.allowed is not None])
            have_choice = torch.isfinite(scores.amax(dim=-1)) & are_numbers
        # On a CPU it is cheaper to look than to pass over the scores; on a GPU, looking means waiting.
        if raw.device.type == "cpu" and bool(have_choice.all()):
            return scores, have_choice
        return torch.where(have_choice.unsqueeze(1), scores, 0.0), have_choice


def _draws(tasks: list[SampleTask]) -> Draws:
    """A token for each sample index of each task, one after the other."""
    counters = [
        (task.rng_key, index, task.position)
        for task in tasks
        if task.params.temperature > 0
        for index in task.sample_indices
    ]
    counts = [len(task.sample_indices) for task in tasks]
    points = np.zeros(sum(counts))
    if counters:
        keys, indices, positions = np.array(counters, np.uint64).T
        points[np.repeat([task.params.temperature > 0 for task in tasks], counts)] = uniforms(keys, indices, positions)
    return Draws(
        temperatures=[task.params.temperature for task in tasks],
        top_k=[task.params.top_k for task in tasks],
        top_p=[task.params.top_p for task in tasks],
        min_p=[task.params.min_p for task in tasks],
        counts=counts,
        uniforms=points,
    )


def _shown(
    tasks: list[SampleTask],
    raw: Tensor,
    normalisers: Tensor,
    scores: Tensor,
    draws: Draws,
    drawn: Tensor,
    ops: SamplingOps,
) -> tuple[Tensor, Tensor]:
    """The scores and normalisers that logprobs are read from: raw ones, but for rows that want processed ones.

    Processed logprobs are those of the distribution that was drawn from; at temperature 0, of the scores that the
    likeliest token was taken from.
    """
    wanted = [i for i, task in enumerate(tasks) if task.params.logprobs_mode == "processed"]
    if not wanted:
        return raw, normalisers
    shown, normalisers = raw.to(torch.float32, copy=True), normalisers.clone()
    shown[wanted] = scores[wanted].float()
    random = np.array([i for i in wanted if tasks[i].params.temperature > 0], np.int64)
    if len(random):
        positions = to_device(random, torch.int64, raw.device)
        own_draws, batch_indices = (to_device(each, torch.int64, raw.device) for each in draws_at(draws, random))
        probs = truncated_probs(shown[positions], draws, random, (batch_indices, drawn[own_draws]))
        shown[positions] = probs.log()
    normalisers[wanted] = ops.logsumexp(shown[wanted])
    return shown, normalisers

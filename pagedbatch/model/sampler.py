"""From logits to token ids: samples for the sample tasks of a step, ranked candidates for its beam tasks."""

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
from pagedbatch.model.torch_sampling import TorchSamplingOps
from pagedbatch.model.transfer import DeviceTask, run_device_tasks, to_device
from pagedbatch.step import BeamResult, SampleResult, SampleTask, SchedulerOutput

NOTHING_LEFT = "the row's settings leave no token to choose at this position"


class Sampler:
    """Samples and ranks in batches, whose results reach the host in one copy per step.

    Args:
        eos_token_ids: not allowed before `min_tokens`.
        sampling_ops: functions of logits on the device; None: those in torch.
        num_token_ids: ids from here on are no tokens, and are never drawn; None: all of the vocabulary are tokens.
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
        """
        max_batch_size = self._ops.max_batch_size(logits)
        num_samples = len(step.samples)
        device_tasks: list[DeviceTask[list[Any]]] = []
        for start in range(0, num_samples, max_batch_size):
            tasks = step.samples[start : start + max_batch_size]
            device_tasks.append(self._sample(tasks, logits[start : start + len(tasks)]))
        device_tasks += beam_device_tasks(
            logits[num_samples:], step.beams, self._eos_token_ids, self._ops, num_token_ids=self._num_token_ids
        )
        results = list(chain.from_iterable(run_device_tasks(device_tasks)))
        return results[:num_samples], results[num_samples:]

    def _sample(self, tasks: list[SampleTask], logits: Tensor) -> DeviceTask[list[SampleResult]]:
        raw = to_supported_dtype(logits, self._ops)
        logsumexp = self._ops.logsumexp(raw)
        are_numbers = torch.isfinite(logsumexp)
        mask_padding_(raw, self._num_token_ids)
        scores, have_choice = self._process(tasks, raw, are_numbers)
        draws = _draws(tasks)
        drawn = self._ops.draw(scores, draws)

        shown, logsumexp = self._shown(tasks, raw, logsumexp, scores, draws)
        batch_indices = to_device(draws.batch_indices, torch.int64, raw.device)
        drawn_logprobs = shown[batch_indices, drawn].float() - logsumexp[batch_indices]
        counts = [task.params.logprobs for task in tasks]
        tops = top_logprobs(counts, shown, logsumexp, self._ops)
        del logits, raw, scores, shown  # large, and not needed while the other device tasks run
        token_ids, logprobs, numbers, choices, *listed = yield [drawn, drawn_logprobs, are_numbers, have_choice, *tops]

        results, start = [], 0
        on_host = zip(tasks, list_top_logprobs(counts, listed), numbers, choices, strict=True)
        for task, top, is_number, has_choice in on_host:
            stop = start + len(task.sample_indices)
            error = None if has_choice else NOTHING_LEFT if is_number else NOT_NUMBERS
            if error == NOTHING_LEFT and task.allowed is not None:  # a dead end of the constraint
                results.append(SampleResult([], []))
            else:
                top_of_draws = None if top is None else [top] * (stop - start)
                results.append(SampleResult(token_ids[start:stop], logprobs[start:stop], top_of_draws, error))
            start = stop
        return results

    def _process(self, tasks: list[SampleTask], raw: Tensor, are_numbers: Tensor) -> tuple[Tensor, Tensor]:
        """The scores after all logits processors and masks, and which positions have a token to choose.

        The scores are a new float32 tensor if anything changes them. Positions without a choice get zeros, so that no
        code below needs a special case.
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
        # On a CPU, looking is cheaper than a pass over the scores; on a GPU, looking means waiting.
        if raw.device.type == "cpu" and bool(have_choice.all()):
            return scores, have_choice
        return torch.where(have_choice.unsqueeze(1), scores, 0.0), have_choice

    def _shown(
        self, tasks: list[SampleTask], raw: Tensor, logsumexp: Tensor, scores: Tensor, draws: Draws
    ) -> tuple[Tensor, Tensor]:
        """What logprobs are read from: scores and their logsumexp, raw or, for tasks that ask for it, processed.

        Processed logprobs are those of the distribution that was drawn from; at temperature 0, of the scores whose
        maximum was taken.
        """
        wanted = [i for i, task in enumerate(tasks) if task.params.logprobs_mode == "processed"]
        if not wanted:
            return raw, logsumexp
        shown, logsumexp = raw.to(torch.float32, copy=True), logsumexp.clone()
        shown[wanted] = scores[wanted].float()
        random = np.array([i for i in wanted if tasks[i].params.temperature > 0], np.int64)
        if len(random):
            positions = to_device(random, torch.int64, raw.device)
            shown[positions] = self._ops.truncated_probs(shown[positions], draws.at(random)).log()
        logsumexp[wanted] = self._ops.logsumexp(shown[wanted])
        return shown, logsumexp


def _draws(tasks: list[SampleTask]) -> Draws:
    """One draw per sample index of each task, in order."""
    counters = [
        (task.rng_key, index, task.position)
        for task in tasks
        if task.params.temperature > 0
        for index in task.sample_indices
    ]
    counts = [len(task.sample_indices) for task in tasks]
    drawn = np.zeros(sum(counts))
    if counters:
        keys, indices, positions = np.array(counters, np.uint64).T
        drawn[np.repeat([task.params.temperature > 0 for task in tasks], counts)] = uniforms(keys, indices, positions)
    return Draws(
        temperatures=[task.params.temperature for task in tasks],
        top_k=[task.params.top_k for task in tasks],
        top_p=[task.params.top_p for task in tasks],
        min_p=[task.params.min_p for task in tasks],
        counts=counts,
        uniforms=drawn,
    )

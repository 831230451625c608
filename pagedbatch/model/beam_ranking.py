"""Chooses the best continuations of beams from logits, in one batch for all groups of a width.

Beams are ranked by summed log-probabilities after all logits processors, as in Hugging Face's `generate`.
"""

from __future__ import annotations

import math
from itertools import groupby

import torch
from pagedbatch_kernels.sampling import SamplingOps
from torch import Tensor

from pagedbatch.model.logits_processors import apply_logits_processors, needs_logits_processors
from pagedbatch.model.logprobs import NOT_NUMBERS, list_top_logprobs, mask_padding_, to_supported_dtype, top_logprobs
from pagedbatch.model.token_mask import apply_token_mask_
from pagedbatch.model.transfer import DeviceTask, to_device
from pagedbatch.step import BeamResult, BeamTask, History


def beam_device_tasks(
    logits: Tensor,
    tasks: list[BeamTask],
    eos_token_ids: frozenset[int],
    ops: SamplingOps,
    *,
    num_token_ids: int | None = None,
) -> list[DeviceTask[list[BeamResult]]]:
    """Device tasks whose results together are those of `tasks`, in order.

    Args:
        logits: [batch_size, vocab_size], the beams of one task after the other.
        eos_token_ids: not allowed before `min_tokens`.
        ops: called for at most `max_batch_size` positions, or one task if it is wider.
        num_token_ids: ids from here on are no tokens, and are never returned.
    """
    max_batch_size = ops.max_batch_size(logits)
    device_tasks: list[DeviceTask[list[BeamResult]]] = []
    first = 0
    for (width, _), alike in groupby(tasks, key=_shape):
        group = list(alike)
        max_tasks = max(1, max_batch_size // width)
        for start in range(0, len(group), max_tasks):
            batch = group[start : start + max_tasks]
            stop = first + width * len(batch)
            device_tasks.append(_rank(batch, logits[first:stop], eos_token_ids, ops, num_token_ids))
            first = stop
    return device_tasks


def _shape(task: BeamTask) -> tuple[int, int]:
    """Tasks that agree in this are ranked in one batch."""
    return len(task.seq_indices), task.num_candidates


def _rank(
    tasks: list[BeamTask], logits: Tensor, eos_token_ids: frozenset[int], ops: SamplingOps, num_token_ids: int | None
) -> DeviceTask[list[BeamResult]]:
    """Ranks tasks of one `_shape`, each task's beams jointly.

    Args:
        logits: [num_tasks * width, vocab_size].
    """
    num_tasks, width, vocab_size = len(tasks), len(tasks[0].seq_indices), logits.shape[1]
    scores = to_supported_dtype(logits, ops)
    logsumexp = ops.logsumexp(scores)
    are_numbers = torch.isfinite(logsumexp).view(num_tasks, width).all(dim=1)
    mask_padding_(scores, num_token_ids)
    raw_counts, processed_counts = _num_top_logprobs(tasks, "raw"), _num_top_logprobs(tasks, "processed")
    raw_tops = top_logprobs(raw_counts, scores, logsumexp, ops)
    if any(task.allowed is not None or needs_logits_processors(task.params, task.position) for task in tasks):
        scores = scores - logsumexp.unsqueeze(1)
        logsumexp = torch.zeros_like(logsumexp)
        _process_(tasks, scores, eos_token_ids)
    processed_tops = top_logprobs(processed_counts, scores, logsumexp, ops)

    cum_logprobs = to_device([score for task in tasks for score in task.scores], torch.float32, logits.device)
    num_candidates = min(tasks[0].num_candidates, width * vocab_size)
    top_scores, indices = ops.joint_topk(scores, logsumexp, cum_logprobs, width, num_candidates)
    top_logits = scores.reshape(num_tasks, -1).gather(1, indices).float()
    logprobs = top_logits - logsumexp.view(num_tasks, width).gather(1, indices // vocab_size)
    del logits, scores  # large, and not needed while the other device tasks run
    on_host = yield [are_numbers, indices, top_scores, logprobs, *raw_tops, *processed_tops]

    raw = list_top_logprobs(raw_counts, on_host[4 : 4 + len(raw_tops)])
    processed = list_top_logprobs(processed_counts, on_host[4 + len(raw_tops) :])
    shown = [top or other or [] for top, other in zip(raw, processed, strict=True)]
    results = []
    for i, (task, is_number, *candidates) in enumerate(zip(tasks, *on_host[:4], strict=True)):
        if not is_number:
            results.append(BeamResult([], [], [], [], error=NOT_NUMBERS))
            continue
        # Processors and masks may leave fewer continuations than candidates.
        possible = [candidate for candidate in zip(*candidates, strict=True) if math.isfinite(candidate[1])]
        results.append(
            BeamResult(
                parents=[index // vocab_size for index, _, _ in possible],
                token_ids=[index % vocab_size for index, _, _ in possible],
                scores=[score for _, score, _ in possible],
                logprobs=[logprob for _, _, logprob in possible],
                top_logprobs=None if task.params.logprobs is None else shown[i * width : (i + 1) * width],
            )
        )
    return results


def _num_top_logprobs(tasks: list[BeamTask], mode: str) -> list[int | None]:
    """For each beam, the number of top logprobs of this mode that its request asks for."""
    return [
        task.params.logprobs if task.params.logprobs_mode == mode else None for task in tasks for _ in task.seq_indices
    ]


def _process_(tasks: list[BeamTask], logprobs: Tensor, eos_token_ids: frozenset[int]) -> None:
    """Applies all logits processors and masks to the log-probabilities of all beams, in place."""
    first = 0
    for task in tasks:
        beams = range(first, first + len(task.seq_indices))
        first = beams.stop
        if needs_logits_processors(task.params, task.position):
            histories: list[History] | list[None] = task.histories or [None] * len(beams)
            for beam, history in zip(beams, histories, strict=True):
                apply_logits_processors(logprobs[beam], task.params, task.position, history, eos_token_ids)
        if task.allowed is not None:
            apply_token_mask_(logprobs, beams, task.allowed)

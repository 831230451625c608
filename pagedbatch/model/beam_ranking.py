"""The best continuations of beams, from logits: one batched pass for all groups of a width. Knows no sequence or block.

Beams are ranked by summed log-probabilities after every control, as in Hugging Face's `generate`.
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
    """The work of ranking each task's beams jointly: the passes' results together are those of `tasks`, in order.

    Args:
        logits: [num_rows, vocab_size], the beams of one task after the other.
        eos_token_ids: what may not come before `min_tokens`.
        ops: does the work on rows, `rows_at_once` of them as far as tasks are no wider.
        num_token_ids: ids from here on are no tokens, and never chosen.
    """
    rows_at_once = ops.max_batch_size(logits)
    passes: list[DeviceTask[list[BeamResult]]] = []
    row = 0
    for (width, _), alike in groupby(tasks, key=_shape):
        group = list(alike)
        tasks_at_once = max(1, rows_at_once // width)
        for start in range(0, len(group), tasks_at_once):
            batch = group[start : start + tasks_at_once]
            stop = row + width * len(batch)
            passes.append(_rank(batch, logits[row:stop], eos_token_ids, ops, num_token_ids))
            row = stop
    return passes


def _shape(task: BeamTask) -> tuple[int, int]:
    """Tasks that agree in this are ranked in one pass."""
    return len(task.seq_indices), task.num_candidates


def _rank(
    tasks: list[BeamTask], logits: Tensor, eos_token_ids: frozenset[int], ops: SamplingOps, num_token_ids: int | None
) -> DeviceTask[list[BeamResult]]:
    """Ranks tasks of one `_shape`.

    Args:
        logits: [num_tasks * width, vocab_size].
    """
    num_tasks, width, vocab_size = len(tasks), len(tasks[0].seq_indices), logits.shape[1]
    scores = to_supported_dtype(logits, ops)
    normalisers = ops.logsumexp(scores)
    are_numbers = torch.isfinite(normalisers).view(num_tasks, width).all(dim=1)
    mask_padding_(scores, num_token_ids)
    raw_counts, processed_counts = _counts(tasks, "raw"), _counts(tasks, "processed")
    raw_tops = top_logprobs(raw_counts, scores, normalisers, ops)
    if any(task.allowed is not None or needs_logits_processors(task.params, task.position) for task in tasks):
        scores = scores - normalisers.unsqueeze(1)
        normalisers = torch.zeros_like(normalisers)
        _process(tasks, scores, eos_token_ids)
    processed_tops = top_logprobs(processed_counts, scores, normalisers, ops)

    standing = to_device([score for task in tasks for score in task.scores], torch.float32, logits.device)
    num_candidates = min(tasks[0].num_candidates, width * vocab_size)
    sums, places = ops.joint_topk(scores, normalisers, standing, width, num_candidates)
    chosen = scores.reshape(num_tasks, -1).gather(1, places).float()
    own = chosen - normalisers.view(num_tasks, width).gather(1, places // vocab_size)
    del logits, scores  # large, and not needed while the other passes are under way
    home = yield [are_numbers, places, sums, own, *raw_tops, *processed_tops]

    tops = list_top_logprobs(raw_counts, home[4 : 4 + len(raw_tops)])
    processed = list_top_logprobs(processed_counts, home[4 + len(raw_tops) :])
    shown = [top or other or [] for top, other in zip(tops, processed, strict=True)]
    results = []
    for i, (task, is_number, *numbers) in enumerate(zip(tasks, *home[:4], strict=True)):
        if not is_number:
            results.append(BeamResult([], [], [], [], error=NOT_NUMBERS))
            continue
        # A control may rule continuations out altogether.
        possible = [one for one in zip(*numbers, strict=True) if math.isfinite(one[1])]
        results.append(
            BeamResult(
                parents=[place // vocab_size for place, _, _ in possible],
                token_ids=[place % vocab_size for place, _, _ in possible],
                scores=[score for _, score, _ in possible],
                logprobs=[logprob for _, _, logprob in possible],
                top_logprobs=None if task.params.logprobs is None else shown[i * width : (i + 1) * width],
            )
        )
    return results


def _counts(tasks: list[BeamTask], mode: str) -> list[int | None]:
    """How many likely tokens of this mode each row's request wants."""
    return [
        task.params.logprobs if task.params.logprobs_mode == mode else None for task in tasks for _ in task.seq_indices
    ]


def _process(tasks: list[BeamTask], logprobs: Tensor, eos_token_ids: frozenset[int]) -> None:
    """Applies every control to the log-probabilities of all beams, in place."""
    first = 0
    for task in tasks:
        rows = range(first, first + len(task.seq_indices))
        first = rows.stop
        if needs_logits_processors(task.params, task.position):
            histories: list[History] | list[None] = task.histories or [None] * len(rows)
            for row, history in zip(rows, histories, strict=True):
                apply_logits_processors(logprobs[row], task.params, task.position, history, eos_token_ids)
        if task.allowed is not None:
            apply_token_mask_(logprobs, rows, task.allowed)

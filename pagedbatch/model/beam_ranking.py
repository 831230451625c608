"""The best continuations of beams, from logits: one batched pass for all groups of a width. Knows no sequence or block.

Beams are ranked by summed log-probabilities after every control, as in Hugging Face's `generate`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from pagedbatch.model.allowed import keep_allowed_
from pagedbatch.model.logprobs import NOT_NUMBERS, top_logprobs
from pagedbatch.model.processors import changes_scores, process_row
from pagedbatch.model.selection import largest
from pagedbatch.outputs import BeamResult, BeamTask, History, TopLogprobs


def rank_beams(
    logits: Tensor, tasks: list[BeamTask], eos_token_ids: frozenset[int], rows_at_once: int
) -> list[BeamResult]:
    """Ranks each task's beams jointly.

    Args:
        logits: [num_rows, vocab_size], the beams of one task after the other.
        eos_token_ids: what may not come before `min_tokens`.
        rows_at_once: rows worked on at once, as far as tasks are no wider.
    """
    results: list[BeamResult] = []
    row = 0
    for (width, _), alike in groupby(tasks, key=_shape):
        group = list(alike)
        tasks_at_once = max(1, rows_at_once // width)
        for start in range(0, len(group), tasks_at_once):
            batch = group[start : start + tasks_at_once]
            stop = row + width * len(batch)
            results += _rank(batch, logits[row:stop].float(), eos_token_ids)
            row = stop
    return results


def _shape(task: BeamTask) -> tuple[int, int]:
    """Tasks that agree in this are ranked in one pass."""
    return len(task.rows), task.num_candidates


def _rank(tasks: list[BeamTask], raw: Tensor, eos_token_ids: frozenset[int]) -> Iterator[BeamResult]:
    """Ranks tasks of one `_shape`.

    Args:
        raw: float32 [num_tasks * width, vocab_size].
    """
    num_tasks, width, vocab_size = len(tasks), len(tasks[0].rows), raw.shape[1]
    logprobs = raw.log_softmax(dim=-1)
    is_sane = torch.isfinite(logprobs.amax(dim=-1)).view(num_tasks, width).all(dim=1)
    tops = _tops(tasks, logprobs, "raw")
    _process(tasks, logprobs, eos_token_ids)
    tops = [raw_top or top for raw_top, top in zip(tops, _tops(tasks, logprobs, "processed"), strict=True)]

    standing = torch.tensor([score for task in tasks for score in task.scores], device=raw.device)
    sums = (logprobs + standing.unsqueeze(1)).view(num_tasks, -1)
    scores, places = largest(sums, min(tasks[0].num_candidates, sums.shape[1]))
    own = logprobs.view(num_tasks, -1).gather(1, places)
    # One small tensor comes home, so that the device is waited for once: float64 holds every index.
    parts = (is_sane.unsqueeze(1), places, scores, own)
    home = torch.cat([part.double() for part in parts], dim=1).cpu().numpy()
    for i, (task, numbers) in enumerate(zip(tasks, home, strict=True)):
        if not numbers[0]:
            yield BeamResult([], [], [], [], error=NOT_NUMBERS)
            continue
        task_places, task_scores, task_logprobs = np.split(numbers[1:], 3)
        possible = np.isfinite(task_scores)  # a control may rule continuations out altogether
        parents, token_ids = np.divmod(task_places[possible].astype(np.int64), vocab_size)
        yield BeamResult(
            parents=parents.tolist(),
            token_ids=token_ids.tolist(),
            scores=task_scores[possible].tolist(),
            logprobs=task_logprobs[possible].tolist(),
            top_logprobs=[top or [] for top in tops[i * width : (i + 1) * width]]
            if task.params.logprobs is not None
            else None,
        )


def _tops(tasks: list[BeamTask], logprobs: Tensor, mode: str) -> list[TopLogprobs | None]:
    """The most likely tokens of each row whose request wants them from `logprobs` of this mode."""
    wanted = [task.params.logprobs if task.params.logprobs_mode == mode else None for task in tasks for _ in task.rows]
    return top_logprobs(wanted, logprobs, logprobs.new_zeros(len(logprobs)))


def _process(tasks: list[BeamTask], logprobs: Tensor, eos_token_ids: frozenset[int]) -> None:
    """Applies every control to the log-probabilities of all beams, in place."""
    first = 0
    for task in tasks:
        rows = range(first, first + len(task.rows))
        first = rows.stop
        if changes_scores(task.params, task.position):
            histories: list[History] | list[None] = task.histories or [None] * len(rows)
            for row, history in zip(rows, histories, strict=True):
                process_row(logprobs[row], task.params, task.position, history, eos_token_ids)
        if task.allowed is not None:
            keep_allowed_(logprobs, rows, task.allowed)

"""How likely the model found the tokens of prompts. Knows no sequence, no queue and no control: logprobs are raw."""

from __future__ import annotations

import torch
from torch import Tensor

from pagedbatch.model.logprobs import NOT_NUMBERS, list_top_logprobs, log_normalisers, top_logprobs
from pagedbatch.outputs import PromptScores, PromptTask

#: Logits worked on at once: what float32 copies of them take stays small whatever the prompt.
_LOGITS_AT_ONCE = 2**22


def score_prompts(logits: Tensor, tasks: list[PromptTask]) -> list[PromptScores]:
    """
    Args:
        logits: [num_targets, vocab_size], those of one task after the other.
        tasks: what to score.
    """
    results, row = [], 0
    for task in tasks:
        results.append(_score(task, logits[row : row + len(task.targets)]))
        row += len(task.targets)
    return results


def _score(task: PromptTask, logits: Tensor) -> PromptScores:
    scores = PromptScores()
    rows_at_once = max(1, _LOGITS_AT_ONCE // logits.shape[1])
    for start in range(0, len(task.targets), rows_at_once):
        raw = logits[start : start + rows_at_once].float()
        targets = torch.tensor(task.targets[start : start + rows_at_once], device=raw.device)
        normalisers = log_normalisers(raw)
        if not bool(torch.isfinite(normalisers).all()):
            return PromptScores(error=NOT_NUMBERS)
        wanted: list[int | None] = [task.num_top] * len(raw)
        tops = [part.tolist() for part in top_logprobs(wanted, raw, normalisers)]
        scores.logprobs.extend((raw.gather(1, targets.unsqueeze(1)).squeeze(1) - normalisers).tolist())
        scores.top_logprobs.extend(top or [] for top in list_top_logprobs(wanted, tops))
    return scores

"""How likely the model found the tokens of prompts. Knows no sequence, no queue and no control: logprobs are raw."""

from __future__ import annotations

import torch
from pagedbatch_kernels.sampling import SamplingOps
from torch import Tensor

from pagedbatch.model.logprobs import NOT_NUMBERS, list_top_logprobs, mask_padding_, to_supported_dtype, top_logprobs
from pagedbatch.step import PromptScores, PromptTask

#: Logits worked on at once: what float32 copies of them take stays small whatever the prompt.
_LOGITS_AT_ONCE = 2**22


def score_prompts(
    logits: Tensor, tasks: list[PromptTask], ops: SamplingOps, num_token_ids: int | None = None
) -> list[PromptScores]:
    """
    Args:
        logits: [num_targets, vocab_size], those of one task after the other.
        tasks: what to score.
        ops: does the work on rows.
        num_token_ids: ids from here on are no tokens, and not listed.
    """
    results, row = [], 0
    for task in tasks:
        results.append(_score(task, logits[row : row + len(task.targets)], ops, num_token_ids))
        row += len(task.targets)
    return results


def _score(task: PromptTask, logits: Tensor, ops: SamplingOps, num_token_ids: int | None) -> PromptScores:
    scores = PromptScores()
    rows_at_once = max(1, _LOGITS_AT_ONCE // logits.shape[1])
    for start in range(0, len(task.targets), rows_at_once):
        raw = to_supported_dtype(logits[start : start + rows_at_once], ops)
        targets = torch.tensor(task.targets[start : start + rows_at_once], device=raw.device)
        normalisers = ops.logsumexp(raw)
        if not bool(torch.isfinite(normalisers).all()):
            return PromptScores(error=NOT_NUMBERS)
        chosen = raw.gather(1, targets.unsqueeze(1)).squeeze(1).float()
        mask_padding_(raw, num_token_ids)
        wanted: list[int | None] = [task.num_top] * len(raw)
        tops = [part.tolist() for part in top_logprobs(wanted, raw, normalisers, ops)]
        scores.logprobs.extend((chosen - normalisers).tolist())
        scores.top_logprobs.extend(top or [] for top in list_top_logprobs(wanted, tops))
    return scores

"""Logprobs of the tokens of prompts: raw, before any logits processor."""

from __future__ import annotations

import torch
from pagedbatch_kernels.sampling import SamplingOps
from torch import Tensor

from pagedbatch.model.logprobs import NOT_NUMBERS, list_top_logprobs, mask_padding_, to_supported_dtype, top_logprobs
from pagedbatch.step import PromptScores, PromptTask

#: Bounds the memory of float32 copies, whatever the prompt's length.
_MAX_LOGITS = 2**22


def score_prompts(
    logits: Tensor, tasks: list[PromptTask], ops: SamplingOps, num_token_ids: int | None = None
) -> list[PromptScores]:
    """
    Args:
        logits: [num_targets, vocab_size], those of one task after the other.
        num_token_ids: ids from here on are no tokens, and not listed.
    """
    results, first = [], 0
    for task in tasks:
        results.append(_score(task, logits[first : first + len(task.targets)], ops, num_token_ids))
        first += len(task.targets)
    return results


def _score(task: PromptTask, logits: Tensor, ops: SamplingOps, num_token_ids: int | None) -> PromptScores:
    scores = PromptScores()
    max_batch_size = max(1, _MAX_LOGITS // logits.shape[1])
    for start in range(0, len(task.targets), max_batch_size):
        raw = to_supported_dtype(logits[start : start + max_batch_size], ops)
        targets = torch.tensor(task.targets[start : start + max_batch_size], device=raw.device)
        logsumexp = ops.logsumexp(raw)
        if not bool(torch.isfinite(logsumexp).all()):
            return PromptScores(error=NOT_NUMBERS)
        target_logits = raw.gather(1, targets.unsqueeze(1)).squeeze(1).float()
        mask_padding_(raw, num_token_ids)
        counts: list[int | None] = [task.num_top] * len(raw)
        tops = [part.tolist() for part in top_logprobs(counts, raw, logsumexp, ops)]
        scores.logprobs.extend((target_logits - logsumexp).tolist())
        scores.top_logprobs.extend(top or [] for top in list_top_logprobs(counts, tops))
    return scores

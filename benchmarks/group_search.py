"""Diverse beam search, dense and slow: the reference of ours, because transformers no longer has one.

A transcription of `group_beam_search`, `HammingDiversityLogitsProcessor` and `BeamSearchScorer` of transformers 4, one
beam and one forward of the whole text at a time. Where transformers 5 changed plain beam search, it follows that: the
heuristic end looks at the best live beam, and at the length limit every candidate is complete. Unlike both, a text that
two groups found comes back once.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from pagedbatch.params import GenerationParams

Ids = tuple[int, ...]


@dataclass
class BeamGroup:
    """Live beams as (ids, summed logprob), complete hypotheses as (score, ids)."""

    beams: list[tuple[Ids, float]]
    hypotheses: list[tuple[float, Ids]] = field(default_factory=list)
    is_done: bool = False


def group_beam_search(
    model: Any, prompt: list[int], params: GenerationParams, eos_token_ids: set[int]
) -> list[tuple[list[int], float]]:
    """(generated ids, score) of the best `n` hypotheses of all groups."""
    group_size = params.num_beams // params.num_beam_groups
    penalty = params.diversity_penalty or 0.0
    groups = [BeamGroup([((), 0.0)]) for _ in range(params.num_beam_groups)]
    for length in range(1, params.max_tokens + 1):
        current_tokens: Counter[int] = Counter()
        for group in groups:
            if group.is_done:
                continue
            candidates = []
            for ids, beam_score in group.beams:
                logprobs = next_logprobs(model, prompt, ids)
                for token_id, count in current_tokens.items():
                    logprobs[token_id] -= penalty * count
                candidates += [(beam_score + logprob, ids, i) for i, logprob in enumerate(logprobs.tolist())]
            candidates.sort(key=lambda candidate: -candidate[0])
            best = candidates[: max(2, 1 + len(eos_token_ids)) * group_size]

            next_beams: list[tuple[Ids, float]] = []
            for rank, (score, ids, token_id) in enumerate(best):
                if token_id in eos_token_ids or length == params.max_tokens:
                    if rank < group_size:
                        add(
                            group.hypotheses,
                            group_size,
                            (length_penalised(score, length, params.length_penalty), (*ids, token_id)),
                        )
                elif len(next_beams) < group_size:
                    next_beams.append(((*ids, token_id), score))
            going_on = [token_id for _, _, token_id in best if token_id not in eos_token_ids][:group_size]
            current_tokens.update(going_on)
            group.beams = next_beams
            group.is_done = is_done(group, group_size, length, params)
        if all(group.is_done for group in groups):
            break
    found: dict[Ids, float] = {}
    for score, ids in sorted((h for group in groups for h in group.hypotheses), key=lambda h: -h[0]):
        found.setdefault(ids, score)
    return [(list(ids), score) for ids, score in found.items()][: params.n]


def length_penalised(score: float, length: int, length_penalty: float) -> float:
    return float(score / length**length_penalty)


def next_logprobs(model: Any, prompt: list[int], ids: Ids) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([[*prompt, *ids]])).logits[0, -1]
    return logits.float().log_softmax(-1)


def add(hypotheses: list[tuple[float, Ids]], group_size: int, hypothesis: tuple[float, Ids]) -> None:
    """Keeps the best `group_size`."""
    hypotheses.append(hypothesis)
    hypotheses.sort(key=lambda h: -h[0])
    del hypotheses[group_size:]


def is_done(group: BeamGroup, group_size: int, length: int, params: GenerationParams) -> bool:
    if not group.beams:
        return True
    if len(group.hypotheses) < group_size:
        return False
    if params.early_stopping is True:
        return True
    at_best = params.max_tokens if params.early_stopping == "never" and params.length_penalty > 0 else length
    return group.hypotheses[-1][0] >= length_penalised(group.beams[0][1], at_best, params.length_penalty)

"""One step of beam search: who survives, who is finished, and whether the search is over. Pure functions.

The meaning is that of Hugging Face's `generate(num_beams=...)`: candidates are ranked by summed logprob; of the best
`num_beams`, those that end become hypotheses, scored by `sum / length ** length_penalty` over generated tokens, the end
token included; the best `num_beams` candidates that do not end live on. `early_stopping`:

- True: stop as soon as `num_beams` hypotheses are complete.
- False: stop when no live beam, scored at its present length, beats the worst hypothesis (a heuristic; the default).
- "never": the same, but with a positive `length_penalty` a live beam is scored as if it kept its sum up to the length
  limit, so that the search stops only when nothing can improve.

With `merge_end_tokens`, which Hugging Face does not have, candidates that differ in their end token alone count once,
with the likeliest.

Diverse beam search runs `num_beam_groups` such searches side by side, each with its own hypotheses and its own end, in
order within a step: `diversify` lowers what earlier ones took.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

from pagedbatch.params import GenerationParams
from pagedbatch.step import BeamResult


@dataclass(frozen=True, slots=True)
class BeamStep:
    """The verdict on one step's candidates, as indices into them.

    `survivors` live on, best first; `finished` become hypotheses with `finished_scores`. `kept` are the indices of the
    existing hypotheses that stay among the best `num_beams`.
    """

    survivors: list[int]
    finished: list[int]
    finished_scores: list[float]
    kept: list[int]
    done: bool


def num_candidates(num_beams: int, num_end_tokens: int, num_penalised: int = 0) -> int:
    """How many candidates a step must look at so that `num_beams` of them do not end.

    Every beam can end in at most `num_end_tokens` ways; at least two candidates per beam are looked at. If a penalty
    lowers at most `num_penalised` of them, that many more are looked at.
    """
    return max(2, 1 + num_end_tokens) * num_beams + num_penalised


def diversify(result: BeamResult, taken: Mapping[int, int], penalty: float, wanted: int) -> BeamResult:
    """The best `wanted` candidates of a beam group after the diversity penalty.

    Hamming diversity (Vijayakumar et al., arXiv 1610.02424), as Hugging Face had it: a candidate's logprob, and so its
    sum and its hypothesis's score, is lowered by `penalty` for each time that a beam of an earlier group went on with
    the same token at this step.

    Args:
        result: candidates of the group, best first: `wanted` of them have tokens that are not in `taken`, or it holds
            all that are possible.
        taken: how many beams of earlier groups went on with each token.
    """
    losses, untouched = [], 0
    for token_id in result.token_ids:
        losses.append(penalty * taken.get(token_id, 0))
        untouched += losses[-1] == 0
        if untouched == wanted:
            break
    lowered = replace(
        result,
        scores=[score - loss for score, loss in zip(result.scores, losses, strict=False)],
        logprobs=[logprob - loss for logprob, loss in zip(result.logprobs, losses, strict=False)],
    )
    order = sorted(range(len(losses)), key=lambda i: -lowered.scores[i])  # stable: an equal one keeps its place
    return _taken(lowered, order[:wanted])


def merge_ends(result: BeamResult, end_token_ids: Container[int]) -> BeamResult:
    """The candidates without those that differ from a better one in their end token alone."""
    kept, ended = [], set()
    for i, (parent, token_id) in enumerate(zip(result.parents, result.token_ids, strict=True)):
        if token_id not in end_token_ids:
            kept.append(i)
        elif parent not in ended:
            kept.append(i)
            ended.add(parent)
    return _taken(result, kept)


def _taken(result: BeamResult, candidates: list[int]) -> BeamResult:
    """These of a result's candidates, in this order."""
    return replace(
        result,
        parents=[result.parents[i] for i in candidates],
        token_ids=[result.token_ids[i] for i in candidates],
        scores=[result.scores[i] for i in candidates],
        logprobs=[result.logprobs[i] for i in candidates],
    )


def length_penalised(score: float, length: int, length_penalty: float) -> float:
    """The score of a hypothesis of `length` generated tokens, the end token included, with summed logprob `score`."""
    return score / math.pow(length, length_penalty)


def select(
    params: GenerationParams,
    scores: Sequence[float],
    ends: Sequence[bool],
    hypothesis_scores: Sequence[float],
    length: int,
    max_length: int,
) -> BeamStep:
    """Ranks one step's candidates.

    Args:
        params: `beams_per_group`, `length_penalty` and `early_stopping` of the request.
        scores: summed logprob of each candidate with its new token, best first.
        ends: whether each is complete (end token, stop string, length limit); up to the last that can live on.
        hypothesis_scores: of the beam group's hypotheses so far.
        length: generated tokens of the candidates, the new one included.
        max_length: maximum number of generated tokens.
    """
    num_beams = params.beams_per_group
    survivors = [i for i, end in enumerate(ends) if not end][:num_beams]

    # Ends outside the best num_beams are dropped: those candidates were only looked at to find enough survivors.
    ended = [i for i, end in enumerate(ends[:num_beams]) if end]
    merged = [(score, 0, i) for i, score in enumerate(hypothesis_scores)]
    merged += [(length_penalised(scores[i], length, params.length_penalty), 1, i) for i in ended]
    merged.sort(key=lambda entry: -entry[0])  # stable: an existing hypothesis wins a tie
    best = merged[:num_beams]

    return BeamStep(
        survivors=survivors,
        finished=[i for _, is_new, i in best if is_new],
        finished_scores=[score for score, is_new, _ in best if is_new],
        kept=[i for _, is_new, i in best if not is_new],
        done=not survivors or _is_over(params, best, scores[survivors[0]], length, max_length),
    )


def _is_over(
    params: GenerationParams, best: list[tuple[float, int, int]], best_live: float, length: int, max_length: int
) -> bool:
    if len(best) < params.beams_per_group:
        return False
    if params.early_stopping is True:
        return True
    looks_ahead = params.early_stopping == "never" and params.length_penalty > 0
    hypothetical = length_penalised(best_live, max_length if looks_ahead else length, params.length_penalty)
    return hypothetical <= best[-1][0]

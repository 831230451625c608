"""Controls against Hugging Face's logits processors, and against their definitions where it has none."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from pagedbatch.model.logits_processors import apply_logits_processors, needs_logits_processors
from pagedbatch.params import GenerationParams
from pagedbatch.step import History

VOCAB_SIZE = 40
EOS = frozenset({2, 3})


def scores(seed: int = 0) -> Tensor:
    """Logits of both signs; as log-probabilities they would all be negative."""
    return torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3


def history(length: int, prompt_length: int, seed: int = 0) -> History:
    ids = random.Random(seed).choices(range(8), k=length)
    return History(ids[:prompt_length], ids[prompt_length:])


def processed(params: GenerationParams, past: History, row: Tensor) -> Tensor:
    position = len(past.output_token_ids)
    result = row.clone()
    if needs_logits_processors(params, position):
        apply_logits_processors(result, params, position, past if params.reads_history else None, EOS)
    return result


def by_hf(processor: LogitsProcessor, past: History, row: Tensor) -> Tensor:
    ids = torch.tensor([past.prompt_token_ids + past.output_token_ids])
    result: Tensor = processor(ids, row.clone().unsqueeze(0))
    return result[0]


@pytest.mark.parametrize("penalty", [0.5, 1.3, 5.0])
@pytest.mark.parametrize("logprobs", [False, True])
def test_repetition_penalty(penalty: float, logprobs: bool) -> None:
    row = scores().log_softmax(-1) if logprobs else scores()
    past = history(12, 5)
    found = processed(GenerationParams(repetition_penalty=penalty), past, row)
    assert torch.equal(found, by_hf(RepetitionPenaltyLogitsProcessor(penalty), past, row))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 60])
def test_no_repeat_ngram(size: int, length: int) -> None:
    for seed in range(5):
        past = history(length, 1, seed)
        found = processed(GenerationParams(no_repeat_ngram_size=size), past, scores())
        assert torch.equal(found, by_hf(NoRepeatNGramLogitsProcessor(size), past, scores()))


@pytest.mark.parametrize("generated", [0, 1, 3, 4, 5])
def test_min_tokens(generated: int) -> None:
    past = history(4 + generated, 4)
    found = processed(GenerationParams(min_tokens=4, stop_token_ids=(9,)), past, scores())
    expected = by_hf(MinNewTokensLengthLogitsProcessor(4, 4, [2, 3, 9]), past, scores())
    assert torch.equal(found, expected)


def test_min_tokens_with_an_end_token_past_the_vocabulary() -> None:
    row = scores()
    apply_logits_processors(row, GenerationParams(min_tokens=4), 0, None, frozenset({2, VOCAB_SIZE}))
    assert row.isneginf().nonzero().flatten().tolist() == [2]


def test_logit_bias() -> None:
    found = processed(GenerationParams(logit_bias=((0, -100.0), (7, 2.5))), history(3, 1), scores())
    expected = by_hf(SequenceBiasLogitsProcessor([[[0], -100.0], [[7], 2.5]]), history(3, 1), scores())
    assert torch.equal(found, expected)


@pytest.mark.parametrize("length", [1, 2, 3, 60])
def test_bad_words(length: int) -> None:
    """Among them one longer than the history, a lone end token, and ones that end alike."""
    words = ((5,), (1, 6), (0, 6), (2, 3, 4), (1, 7, 0, 2, 3), (2,), (7, 3))
    for seed in range(20):
        past = history(length, 1, seed)
        found = processed(GenerationParams(bad_words=words), past, scores())
        expected = by_hf(NoBadWordsLogitsProcessor([list(word) for word in words], [2, 3]), past, scores())
        assert torch.equal(found, expected)


def test_single_bad_words_need_no_history() -> None:
    params = GenerationParams(bad_words=((5,), (9,)))
    assert not params.reads_history
    assert processed(params, history(9, 3), scores()).isneginf().nonzero().flatten().tolist() == [5, 9]


def test_allowed_token_ids_come_last() -> None:
    params = GenerationParams(allowed_token_ids=(2, 6, 7), min_tokens=5, logit_bias=((6, 1.5), (8, 99.0)))
    found = processed(params, history(3, 3), scores())
    assert found[[6, 7]].tolist() == [scores()[6].item() + 1.5, scores()[7].item()]
    assert found.isneginf().sum() == VOCAB_SIZE - 2


def test_presence_and_frequency_penalty_count_the_output_only() -> None:
    past = History(prompt_token_ids=[5, 5, 6], output_token_ids=[6, 7, 7, 7])
    found = processed(GenerationParams(presence_penalty=0.5, frequency_penalty=0.25), past, scores())
    expected = scores()
    expected[6] -= 0.5 + 0.25 * 1
    expected[7] -= 0.5 + 0.25 * 3
    torch.testing.assert_close(found, expected)


def test_penalties_before_the_first_token() -> None:
    past = History(prompt_token_ids=[5], output_token_ids=[])
    params = GenerationParams(presence_penalty=1.0, frequency_penalty=1.0)
    assert torch.equal(processed(params, past, scores()), scores())


def test_order_is_that_of_hf() -> None:
    """The bias comes before the penalty that scales it, and the bans come last."""
    params = GenerationParams(
        logit_bias=((2, 50.0), (5, 4.0)), repetition_penalty=1.7, no_repeat_ngram_size=2, min_tokens=99
    )
    past, expected = history(30, 10), scores()
    for processor in (
        SequenceBiasLogitsProcessor([[[2], 50.0], [[5], 4.0]]),
        RepetitionPenaltyLogitsProcessor(1.7),
        NoRepeatNGramLogitsProcessor(2),
        MinNewTokensLengthLogitsProcessor(10, 99, [2, 3]),
    ):
        expected = by_hf(processor, past, expected)
    assert torch.equal(processed(params, past, scores()), expected)


def test_controls_at_rest_change_nothing() -> None:
    assert not needs_logits_processors(GenerationParams(temperature=1.0, top_p=0.5, min_tokens=3), position=3)
    assert needs_logits_processors(GenerationParams(min_tokens=3), position=2)

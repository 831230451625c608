"""Allowed tokens, listed or as bits, applied to scores."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagedbatch.constraint import Allowed, AllowedIds, AllowedMask
from pagedbatch.model.token_mask import apply_token_mask_


def listed(token_ids: list[int]) -> AllowedIds:
    return AllowedIds(np.array(token_ids, np.int64))


def masked(token_ids: list[int], vocab_size: int) -> AllowedMask:
    words = [0] * -(-vocab_size // 32)
    for token_id in token_ids:
        words[token_id // 32] |= 1 << token_id % 32
    return AllowedMask(np.array(words, np.uint32).view(np.int32))


@given(st.data(), st.sampled_from([1, 31, 32, 33, 100]), st.integers(1, 5))
def test_what_is_allowed_keeps_its_score(data: st.DataObject, vocab_size: int, batch_size: int) -> None:
    scores = torch.randn(batch_size, vocab_size, generator=torch.Generator().manual_seed(0))
    expected = scores.clone()
    positions = data.draw(st.lists(st.integers(0, batch_size - 1), unique=True))
    kinds: list[Allowed] = []
    for position in positions:
        token_ids = data.draw(st.lists(st.integers(0, vocab_size - 1), unique=True))
        kinds.append(listed(token_ids) if data.draw(st.booleans()) else masked(token_ids, vocab_size))
        for token_id in set(range(vocab_size)) - set(token_ids):
            expected[position, token_id] = -math.inf
    apply_token_mask_(scores, positions, kinds)
    assert torch.equal(scores, expected)


@pytest.mark.parametrize("kind", [listed([0, 5]), masked([0, 5], 40)], ids=["listed", "masked"])
def test_what_a_control_forbade_stays_forbidden(kind: Allowed) -> None:
    scores = torch.zeros(2, 40)
    scores[1, 5] = -math.inf
    apply_token_mask_(scores, [1], [kind])
    assert scores[1].isfinite().nonzero().flatten().tolist() == [0]
    assert scores[0].isfinite().all()

"""The generator against the vectors of its authors, and what the sampler needs of it."""

from __future__ import annotations

import numpy as np
import pytest

from pagedbatch.model.philox import philox4x32, uniforms

#: Philox4x32-10 in kat_vectors of the Random123 distribution: counter, key, output.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> np.ndarray:
    return np.array([int(word, 16) for word in text.split()], np.uint64)


def draws(count: int, key: int = 2**63 + 7) -> np.ndarray:
    return uniforms(np.full(count, key, np.uint64), np.zeros(count, np.uint64), np.arange(count, dtype=np.uint64))


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_known_answers(counter: str, key: str, output: str) -> None:
    assert (philox4x32(words(counter)[None], words(key)[None])[0] == words(output)).all()


def test_known_answers_in_one_batch() -> None:
    counters, keys, outputs = (np.stack([words(row[i]) for row in KNOWN_ANSWERS]) for i in range(3))
    assert (philox4x32(counters, keys) == outputs).all()


def test_uniforms_fill_the_unit_interval_evenly() -> None:
    points = draws(100_000)
    assert points.min() >= 0.0
    assert points.max() < 1.0
    counts = np.histogram(points, bins=100, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 149  # chi-square, 99 degrees of freedom: 0.999 quantile


def test_largest_words_stay_below_one() -> None:
    """53 bits: no rounding up to 1."""
    assert float((2**64 - 1) >> 11) * 2.0**-53 == 1 - 2.0**-53
    assert (draws(1000) * 2.0**53 % 1 == 0).all()


def test_a_draw_depends_on_its_key_and_counter_alone() -> None:
    keys = np.array([1, 2**32 + 1, 1, 1, 2**64 - 1], np.uint64)
    indices = np.array([0, 0, 1, 0, 3], np.uint64)
    positions = np.array([0, 0, 0, 1, 9], np.uint64)
    together = uniforms(keys, indices, positions)
    assert len(set(together)) == 5
    for i in range(5):
        one = slice(i, i + 1)
        assert uniforms(keys[one], indices[one], positions[one])[0] == together[i]
    assert (uniforms(keys[::-1], indices[::-1], positions[::-1]) == together[::-1]).all()


def test_index_and_position_are_not_confused() -> None:
    one, two = np.array([1], np.uint64), np.array([2], np.uint64)
    assert uniforms(one, one, two) != uniforms(one, two, one)


def test_indices_count_past_32_bits() -> None:
    keys, positions = np.ones(3, np.uint64), np.zeros(3, np.uint64)
    assert len(set(uniforms(keys, np.array([5, 2**32 + 5, 2**63 + 5], np.uint64), positions))) == 3

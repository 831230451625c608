"""Uniform random numbers that depend on nothing but a key and a counter.

Philox4x32-10 of Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC'11): the draw of a sequence at a
position is the same whatever ran beside it, before it, or was preempted.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_ROUNDS = 10


def philox4x32(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Ten rounds of Philox4x32.

    Args:
        counter: uint64 [num_draws, 4], each below 2**32.
        key: uint64 [num_draws, 2], each below 2**32.

    Returns:
        uint64 [num_draws, 4], each below 2**32.
    """
    c0, c1, c2, c3 = counter.T
    k0, k1 = key.T
    for _ in range(_ROUNDS):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> _HALF) ^ c1 ^ k0,
            product1 & _LOW,
            (product0 >> _HALF) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0, k1 = (k0 + np.uint64(_WEYL[0])) & _LOW, (k1 + np.uint64(_WEYL[1])) & _LOW
    return np.stack([c0, c1, c2, c3], axis=1)


def uniforms(keys: np.ndarray, sample_indices: np.ndarray, positions: np.ndarray) -> NDArray[np.float64]:
    """One number in [0, 1) for each (key, sample index, position), with 53 random bits.

    Args:
        keys: uint64 [num_draws], made from the seed and the row's id.
        sample_indices, positions: uint64 [num_draws].

    Returns:
        float64 [num_draws].
    """
    counter = np.stack([positions & _LOW, sample_indices & _LOW, positions >> _HALF, sample_indices >> _HALF], axis=1)
    bits = philox4x32(counter, np.stack([keys & _LOW, keys >> _HALF], axis=1))
    mantissa: np.ndarray = ((bits[:, 0] << _HALF) | bits[:, 1]) >> np.uint64(11)
    return mantissa.astype(np.float64) * np.float64(2.0**-53)

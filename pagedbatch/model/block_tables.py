"""Block tables of different lengths as one array."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np


def pack_block_tables(block_tables: Sequence[Sequence[int]]) -> np.ndarray:
    """int64 [num_tables, max_blocks], zero past each table's last block."""
    lengths = np.fromiter(map(len, block_tables), np.int64, len(block_tables))
    packed = np.zeros((len(block_tables), int(lengths.max())), np.int64)
    flat = np.fromiter(chain.from_iterable(block_tables), np.int64, int(lengths.sum()))
    packed[np.arange(packed.shape[1]) < lengths[:, None]] = flat
    return packed

"""A scheduled step as tensors: one flat, ragged batch without padding. Knows no model and no cache."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from pagedbatch_kernels.interface import AttentionBatch
from torch import Tensor

from pagedbatch.outputs import ScheduledSequence, SchedulerOutput


@dataclass(frozen=True, slots=True)
class InputBatch:
    """What one forward takes.

    `logits_indices` are the flat positions whose logits are needed: the last token of each row of `rows_needed`.
    """

    input_ids: Tensor  #: int64 [1, num_tokens]
    position_ids: Tensor  #: int64 [1, num_tokens]
    logits_indices: Tensor  #: int64 [num_logits]
    attention: AttentionBatch


def rows_needed(step: SchedulerOutput) -> list[int]:
    """The scheduled rows that draw or rank a token, in task order: first the samples, then the beams."""
    return [task.row for task in step.samples] + [row for task in step.beams for row in task.rows]


def make_input_batch(step: SchedulerOutput, block_size: int, device: torch.device) -> InputBatch:
    """Lays the scheduled sequences end to end."""
    sequences = step.sequences
    query_lens = np.fromiter((len(s.token_ids) for s in sequences), np.int64, len(sequences))
    context_lens = np.fromiter((s.context_len for s in sequences), np.int64, len(sequences))
    query_start_loc = np.concatenate([[0], np.cumsum(query_lens)])
    num_tokens = int(query_start_loc[-1])
    input_ids = np.fromiter(chain.from_iterable(s.token_ids for s in sequences), np.int64, num_tokens)

    row_of_token = np.repeat(np.arange(len(sequences)), query_lens)
    positions = np.arange(num_tokens) - query_start_loc[row_of_token] + context_lens[row_of_token]
    block_tables = _pack_block_tables(sequences)
    slot_mapping = block_tables[row_of_token, positions // block_size] * block_size + positions % block_size
    last_token = query_start_loc[1:] - 1

    def on_device(array: np.ndarray, dtype: type[np.generic]) -> Tensor:
        return torch.from_numpy(array.astype(dtype, copy=False)).to(device, non_blocking=True)

    return InputBatch(
        input_ids=on_device(input_ids, np.int64).unsqueeze(0),
        position_ids=on_device(positions, np.int64).unsqueeze(0),
        logits_indices=on_device(last_token[rows_needed(step)], np.int64),
        attention=AttentionBatch(
            block_tables=on_device(block_tables, np.int32),
            seq_lens=on_device(context_lens + query_lens, np.int32),
            query_start_loc=on_device(query_start_loc, np.int32),
            slot_mapping=on_device(slot_mapping, np.int64),
            max_query_len=int(query_lens.max()),
            max_seq_len=int((context_lens + query_lens).max()),
        ),
    )


def _pack_block_tables(sequences: list[ScheduledSequence]) -> np.ndarray:
    """Block tables as one array [num_seqs, max_blocks], zero past each sequence's last block."""
    lengths = np.fromiter((len(s.block_table) for s in sequences), np.int64, len(sequences))
    packed = np.zeros((len(sequences), int(lengths.max())), np.int64)
    flat = np.fromiter(chain.from_iterable(s.block_table for s in sequences), np.int64, int(lengths.sum()))
    packed[np.arange(packed.shape[1]) < lengths[:, None]] = flat
    return packed

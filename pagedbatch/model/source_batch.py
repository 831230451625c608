"""The sources of a step as tensors: what the encoder reads, and what the decoder's tokens read across."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from pagedbatch_kernels.interface import AttentionBatch
from torch import Tensor

from pagedbatch.model.block_tables import pack_block_tables
from pagedbatch.model.transfer import to_device_packed
from pagedbatch.step import ScheduledSource


@dataclass(frozen=True, slots=True)
class EncoderBatch:
    """Sources to encode in a step, laid end to end without padding.

    `attention` is over blocks of a scratch cache of `num_blocks` blocks; `slot_mapping` says where in the pool the
    decoder's cross-attention keeps K and V of each token.
    """

    input_ids: Tensor  #: int64 [1, num_source_tokens]
    position_ids: Tensor  #: int64 [1, num_source_tokens]
    slot_mapping: Tensor  #: int64 [num_source_tokens]
    attention: AttentionBatch
    num_blocks: int


@dataclass(frozen=True, slots=True)
class SourceBatch:
    """What the query tokens of a step read across, and what must be encoded before.

    All query tokens of the sequences that read one source are one sequence of `across`: the source is read once.
    """

    across: AttentionBatch
    encoder: EncoderBatch | None


def source_batch(
    sources: list[ScheduledSource], query_start_loc: np.ndarray, block_size: int, device: torch.device
) -> SourceBatch:
    """
    Args:
        sources: read, in order, by all scheduled sequences.
        query_start_loc: [num_seqs + 1], where the query tokens of each scheduled sequence begin.
    """
    starts = query_start_loc[[0, *(source.readers.stop for source in sources)]]
    lengths = np.array([source.num_tokens for source in sources])
    tables = pack_block_tables([source.block_table for source in sources])
    block_tables, seq_lens, start_loc = to_device_packed([tables, lengths, starts], device)
    across = AttentionBatch(
        block_tables=block_tables.view(tables.shape).int(),
        seq_lens=seq_lens.int(),
        query_start_loc=start_loc.int(),
        slot_mapping=start_loc[:0],
        max_query_len=int(np.diff(starts).max()),
        max_seq_len=int(lengths.max()),
        causal=False,
    )
    return SourceBatch(across, _encoder_batch([s for s in sources if s.token_ids is not None], block_size, device))


def _encoder_batch(new: list[ScheduledSource], block_size: int, device: torch.device) -> EncoderBatch | None:
    if not new:
        return None
    lengths = np.array([source.num_tokens for source in new])
    starts = np.concatenate([[0], np.cumsum(lengths)])
    owners = np.repeat(np.arange(len(new)), lengths)
    positions = np.arange(starts[-1]) - starts[owners]
    blocks, offsets = positions // block_size, positions % block_size
    num_blocks = -(-lengths // block_size)
    first_blocks = np.cumsum(num_blocks) - num_blocks
    scratch_tables = np.minimum(first_blocks[:, None] + np.arange(num_blocks.max()), num_blocks.sum() - 1)
    tensors = to_device_packed(
        [
            np.fromiter(chain.from_iterable(source.token_ids or () for source in new), np.int64, starts[-1]),
            positions,
            pack_block_tables([source.block_table for source in new])[owners, blocks] * block_size + offsets,
            scratch_tables[owners, blocks] * block_size + offsets,
            scratch_tables,
            lengths,
            starts,
        ],
        device,
    )
    input_ids, position_ids, slots, scratch_slots, tables, seq_lens, start_loc = tensors
    attention = AttentionBatch(
        block_tables=tables.view(scratch_tables.shape).int(),
        seq_lens=seq_lens.int(),
        query_start_loc=start_loc.int(),
        slot_mapping=scratch_slots,
        max_query_len=int(lengths.max()),
        max_seq_len=int(lengths.max()),
        causal=False,
    )
    return EncoderBatch(input_ids.unsqueeze(0), position_ids.unsqueeze(0), slots, attention, int(num_blocks.sum()))

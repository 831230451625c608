"""A scheduled step as tensors: one flat, ragged batch without padding."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from pagedbatch_kernels.interface import AttentionBatch, SharedPrefixes
from pagedbatch_kernels.prefix_groups import PrefixCosts, find_prefix_groups
from torch import Tensor

from pagedbatch.model.block_tables import pack_block_tables
from pagedbatch.model.source_batch import SourceBatch, source_batch
from pagedbatch.model.transfer import to_device_packed
from pagedbatch.step import ScheduledSequence, SchedulerOutput


@dataclass(frozen=True, slots=True)
class InputBatch:
    """What one forward takes.

    `logits_indices` are the flat positions whose logits are needed: the last token of each of `sampled_sequences`, then
    those that the step's prompt tasks score. `last_attention` is the attention of these positions alone, each a
    sequence of its own: all that the last layer has to compute. None if it would save nothing.
    """

    input_ids: Tensor  #: int64 [1, num_tokens]
    position_ids: Tensor  #: int64 [1, num_tokens]
    logits_indices: Tensor  #: int64 [num_logits]
    attention: AttentionBatch
    last_attention: AttentionBatch | None = None
    source: SourceBatch | None = None  #: None: the model is a decoder


def sampled_sequences(step: SchedulerOutput) -> list[int]:
    """Indices of the scheduled sequences that need logits of their last token: of the samples, then of the beams."""
    return [task.seq_index for task in step.samples] + [i for task in step.beams for i in task.seq_indices]


class InputBatcher:
    """Builds the tensors of each step on `device`. A GPU gets all integers of a step in one copy."""

    def __init__(self, block_size: int, device: torch.device, prefix_costs: PrefixCosts | None) -> None:
        self._block_size = block_size
        self._device = device
        self._prefix_costs = prefix_costs

    def __call__(self, step: SchedulerOutput) -> InputBatch:
        """Lays the scheduled sequences end to end."""
        sequences, block_size = step.sequences, self._block_size
        query_lens = np.fromiter((len(s.token_ids) for s in sequences), np.int64, len(sequences))
        context_lens = np.fromiter((s.context_len for s in sequences), np.int64, len(sequences))
        query_start_loc = np.concatenate([[0], np.cumsum(query_lens)])
        num_tokens = int(query_start_loc[-1])

        seq_indices = np.repeat(np.arange(len(sequences)), query_lens)
        positions = np.arange(num_tokens) - query_start_loc[seq_indices] + context_lens[seq_indices]
        block_tables = pack_block_tables([s.block_table for s in sequences])
        slot_mapping = block_tables[seq_indices, positions // block_size] * block_size + positions % block_size
        last_token = query_start_loc[1:] - 1
        scored = (query_start_loc[task.seq_index] + task.first + np.arange(len(task.targets)) for task in step.prompts)

        tensors = to_device_packed(
            [
                np.fromiter(chain.from_iterable(s.token_ids for s in sequences), np.int64, num_tokens),
                positions,
                np.concatenate([last_token[sampled_sequences(step)], *scored]),
                slot_mapping,
                block_tables,
                context_lens + query_lens,
                query_start_loc,
            ],
            self._device,
        )
        input_ids, position_ids, logits_indices, slots, tables, seq_lens, starts = tensors
        attention = AttentionBatch(
            block_tables=tables.view(block_tables.shape).int(),
            seq_lens=seq_lens.int(),
            query_start_loc=starts.int(),
            slot_mapping=slots,
            max_query_len=int(query_lens.max()),
            max_seq_len=int((context_lens + query_lens).max()),
            shared_prefixes=self._shared_prefixes(sequences, query_lens.tolist(), query_start_loc.tolist()),
        )
        needed = sampled_sequences(step)
        saves = self._device.type == "cpu" and not step.prompts and 0 < len(needed) < num_tokens
        return InputBatch(
            input_ids=input_ids.unsqueeze(0),
            position_ids=position_ids.unsqueeze(0),
            logits_indices=logits_indices,
            attention=attention,
            last_attention=_last_tokens(attention, needed) if saves else None,
            source=source_batch(step.sources, query_start_loc, block_size, self._device) if step.sources else None,
        )

    def _shared_prefixes(
        self, sequences: list[ScheduledSequence], query_lens: list[int], query_start_loc: list[int]
    ) -> SharedPrefixes | None:
        if self._prefix_costs is None:
            return None
        tables = [s.block_table for s in sequences]
        context_lens = [s.context_len for s in sequences]
        groups = find_prefix_groups(tables, query_lens, context_lens, self._block_size, self._prefix_costs)
        return SharedPrefixes.from_groups(groups, tables, query_start_loc, self._block_size, self._device)


def _last_tokens(attention: AttentionBatch, seq_indices: list[int]) -> AttentionBatch:
    """The attention of the last token of each of these sequences, whose K/V are in the cache already."""
    return AttentionBatch(
        block_tables=attention.block_tables[seq_indices],
        seq_lens=attention.seq_lens[seq_indices],
        query_start_loc=torch.arange(len(seq_indices) + 1, dtype=torch.int32),
        slot_mapping=attention.slot_mapping[:0],
        max_query_len=1,
        max_seq_len=attention.max_seq_len,
    )

"""A scheduled step laid out as tensors: tokens end to end, each with its position and its slot."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedbatch.model.input_batch import InputBatch, InputBatcher, sampled_sequences
from pagedbatch.params import GenerationParams
from pagedbatch.step import BeamTask, SampleTask, ScheduledSequence, SchedulerOutput

BLOCK_SIZE = 4


def step(
    *sequences: ScheduledSequence, samples: tuple[int, ...] = (), beams: tuple[range, ...] = ()
) -> SchedulerOutput:
    num_tokens = sum(len(sequence.token_ids) for sequence in sequences)
    params = GenerationParams()
    return SchedulerOutput(
        step=0,
        sequences=list(sequences),
        samples=[SampleTask(i, params, 0, (0,), 0) for i in samples],
        beams=[BeamTask(seqs, params, [0.0] * len(seqs), 2 * len(seqs), 0) for seqs in beams],
        copies=[],
        swap_out=[],
        swap_in=[],
        num_tokens=num_tokens,
    )


MIXED = (
    ScheduledSequence(10, [5, 6, 7, 8, 9], context_len=0, block_table=[3, 1]),  # a prompt
    ScheduledSequence(11, [20], context_len=8, block_table=[0, 7, 2]),  # a decode that opens a block
    ScheduledSequence(12, [30, 31, 32], context_len=2, block_table=[9, 4]),  # a chunk across a border
    ScheduledSequence(13, [40], context_len=3, block_table=[5]),  # a decode that fills a block
)


def batch_of(scheduled: SchedulerOutput) -> InputBatch:
    return InputBatcher(BLOCK_SIZE, torch.device("cpu"), prefix_costs=None)(scheduled)


def listed(tensor: torch.Tensor) -> Any:
    return tensor.tolist()


def test_tokens_lie_end_to_end_with_their_positions_and_slots() -> None:
    batch = batch_of(step(*MIXED))
    assert listed(batch.input_ids) == [[5, 6, 7, 8, 9, 20, 30, 31, 32, 40]]
    assert listed(batch.position_ids) == [[0, 1, 2, 3, 4, 8, 2, 3, 4, 3]]
    assert listed(batch.attention.slot_mapping) == [12, 13, 14, 15, 4, 8, 38, 39, 16, 23]
    assert listed(batch.attention.query_start_loc) == [0, 5, 6, 9, 10]
    assert listed(batch.attention.seq_lens) == [5, 9, 5, 4]
    assert (batch.attention.max_query_len, batch.attention.max_seq_len) == (5, 9)


def test_block_tables_are_packed_to_the_longest() -> None:
    batch = batch_of(step(*MIXED))
    tables = listed(batch.attention.block_tables)
    expected = [s.block_table for s in MIXED]
    assert [table[: len(each)] for table, each in zip(tables, expected, strict=True)] == expected
    assert {len(table) for table in tables} == {3}


@pytest.mark.parametrize(
    ("samples", "beams", "sampled", "indices"),
    [
        ((), (), [], []),
        ((3, 0), (), [3, 0], [9, 4]),
        ((1,), (range(2, 4),), [1, 2, 3], [5, 8, 9]),
        ((), (range(2, 4), range(1)), [2, 3, 0], [8, 9, 4]),
    ],
)
def test_logits_are_those_of_the_last_tokens_in_task_order(
    samples: tuple[int, ...], beams: tuple[range, ...], sampled: list[int], indices: list[int]
) -> None:
    scheduled = step(*MIXED, samples=samples, beams=beams)
    assert sampled_sequences(scheduled) == sampled
    logits_indices = batch_of(scheduled).logits_indices
    assert listed(logits_indices) == indices
    assert logits_indices.dtype == torch.int64


def test_dtypes_are_those_of_the_interface() -> None:
    attention = batch_of(step(*MIXED)).attention
    assert {t.dtype for t in (attention.block_tables, attention.seq_lens, attention.query_start_loc)} == {torch.int32}
    assert attention.slot_mapping.dtype == torch.int64


def test_one_token() -> None:
    batch = batch_of(step(ScheduledSequence(0, [1], 0, [6]), samples=(0,)))
    assert listed(batch.attention.slot_mapping) == [24]
    assert listed(batch.logits_indices) == [0]

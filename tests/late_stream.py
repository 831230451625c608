"""A device that does its work as late as it may: nothing of it has run before the host waits.

A GPU's stream is anything between this and a device that is always done at once. What the host overwrites too early, it
overwrites here too early each time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_runner import FakeRunner
from pagedbatch_kernels.interface import AttentionBatch, CacheShape
from pagedbatch_kernels.prefix_groups import PrefixCosts
from torch import Tensor

from pagedbatch.model import kv_cache
from pagedbatch.model.input_batch import InputBatch, InputBatcher, sampled_sequences
from pagedbatch.model.kv_cache import KVCache
from pagedbatch.step import ModelRunnerOutput, SchedulerOutput

DEVICE = torch.device("cuda")
#: Sharing pays always, as far as these say.
FREE = PrefixCosts(queries_per_kv=1, plain_tile=1, shared_tile=64, reread=1.0, merge=0.0, launch=0.0)


class LateStream:
    """Work in the order in which it was launched. What it reads is looked at when it runs."""

    def __init__(self) -> None:
        self._work: list[Callable[[], object]] = []

    def launch(self, work: Callable[[], object]) -> None:
        self._work.append(work)

    def wait(self) -> None:
        work, self._work = self._work, []
        for one in work:
            one()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Copies to the device, and casts on it, become work of this stream.

        Memory that a copy still has to read stays what it is after the tensor is gone, as torch's pinned memory does.
        """
        real_to, real_empty, real_tensor = Tensor.to, torch.empty, torch.tensor

        def later(values: Tensor, dtype: torch.dtype) -> Tensor:
            result = real_empty(values.shape, dtype=dtype).fill_(-1)
            self.launch(lambda: result.copy_(values))
            return result

        def to(values: Tensor, *args: Any, **options: Any) -> Tensor:
            if args[:1] != (DEVICE,):
                return real_to(values, *args, **options)
            assert options == {"non_blocking": True}, "the host would wait"
            return later(values, values.dtype)

        def without_pinning(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
            return lambda *args, pin_memory=False, **options: make(*args, **options)

        monkeypatch.setattr(Tensor, "to", to)
        monkeypatch.setattr(Tensor, "int", lambda values: later(values, torch.int32))
        monkeypatch.setattr(Tensor, "pin_memory", Tensor.clone)
        monkeypatch.setattr(torch, "empty", without_pinning(real_empty))
        monkeypatch.setattr(torch, "tensor", without_pinning(real_tensor))


class _Memory:
    """Blocks of token slots, on the device or in the host's pinned memory. A slot holds a token id."""

    def __init__(self, num_blocks: int, block_size: int, device: torch.device) -> None:
        self.device = device
        self.blocks = torch.full((num_blocks, block_size), -1)


class _Backend:
    """The moving part of a kernel backend, as work of a stream."""

    def __init__(self, stream: LateStream) -> None:
        self._stream = stream

    def allocate_cache(
        self, shape: CacheShape, num_blocks: int, dtype: torch.dtype, device: torch.device, *, is_spare: bool
    ) -> _Memory:
        return _Memory(num_blocks, shape.block_size, device)

    def copy_blocks(self, cache: _Memory, src: Tensor, dst: Tensor) -> None:
        self.swap_blocks(cache, cache, src, dst)

    def swap_blocks(self, source: _Memory, target: _Memory, src: Tensor, dst: Tensor) -> None:
        def copy() -> None:
            target.blocks[dst] = source.blocks[src]

        self._stream.launch(copy)


class LateRunner(FakeRunner):
    """The fake runner, with the real layout of a step and the real moves of blocks, on a late stream."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, num_blocks: int, block_size: int, num_swap_blocks: int, vocab_size: int
    ) -> None:
        super().__init__(0, block_size, 0, vocab_size)
        self._stream = LateStream()
        self._stream.install(monkeypatch)
        monkeypatch.setattr(kv_cache, "free_memory", lambda device: 2**40)
        backend: Any = _Backend(self._stream)
        shape = CacheShape(1, block_size, 1, 1)
        self._cache = KVCache(backend, shape, num_blocks, num_swap_blocks, torch.int64, DEVICE)
        self._make_batch = InputBatcher(block_size, DEVICE, FREE)

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self.steps.append(step)
        self._cache.apply(step.swap_out, step.swap_in, step.copies)
        batch = self._make_batch(step)
        read: list[tuple[int | None, ...]] = []
        self._stream.launch(lambda: read.extend(self._forward(batch, sampled_sequences(step))))
        if step.samples or step.beams:
            self._stream.wait()
        return ModelRunnerOutput(
            samples=[self._draw(task, read[task.seq_index]) for task in step.samples],
            beams=[self._rank(task, [read[row] for row in task.seq_indices]) for task in step.beams],
        )

    def _forward(self, batch: InputBatch, needed: list[int]) -> list[tuple[int | None, ...]]:
        """What each sequence reads: its tokens so far, of which this step's have just been stored."""
        memory: Any = self._cache.device_cache
        slots = memory.blocks.view(-1)
        slots[batch.attention.slot_mapping] = batch.input_ids[0]
        last_tokens = batch.attention.query_start_loc[1:] - 1
        assert batch.logits_indices.tolist() == last_tokens[needed].tolist()
        read = []
        for row, seq_len in enumerate(batch.attention.seq_lens.tolist()):
            positions = torch.arange(seq_len)
            blocks = batch.attention.block_tables[row][positions // self.block_size].long()
            table, prefix = _shared_prefix(batch.attention, row)
            blocks[:prefix] = table[positions[:prefix] // self.block_size].long()
            read.append(tuple(slots[blocks * self.block_size + positions % self.block_size].tolist()))
        ends = [batch.attention.query_start_loc[row + 1] for row in range(len(read))]
        own = batch.position_ids[0][[int(end) - 1 for end in ends]]
        assert own.tolist() == [len(tokens) - 1 for tokens in read]
        return read


def _shared_prefix(attention: AttentionBatch, row: int) -> tuple[Tensor, int]:
    """The blocks that `row` reads together with others, and how many tokens are in them."""
    shared = attention.shared_prefixes
    if shared is None:
        return attention.block_tables[row], 0
    run = int((shared.query_start_loc <= attention.query_start_loc[row]).sum()) - 1
    assert shared.prefix_lens[run] == shared.seq_prefix_lens[row]
    return shared.block_tables[run], int(shared.seq_prefix_lens[row])

"""The interface of a backend, and the records that it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from pagedbatch_kernels.prefix_groups import PrefixCosts, PrefixGroup


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The paged KV cache of a model: blocks of `block_size` token slots, for all layers."""

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_size: int

    def block_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one block: all layers, K and V."""
        return 2 * self.num_layers * self.block_size * self.num_kv_heads * self.head_size * dtype.itemsize


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One layer's attention: query head h reads KV head `h // (num_heads // num_kv_heads)`."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    itemsize: int  #: bytes of an element of query and cache


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The ragged batch of one step: the query tokens of `num_seqs` sequences, packed without padding.

    Sequence i owns query tokens `query_start_loc[i]:query_start_loc[i + 1]`, possibly none. The K/V of its
    `seq_lens[i]` tokens lie in the blocks `block_tables[i]`, in order.

    If `causal`, the query tokens are the last of these tokens, and each attends to the tokens up to itself. Otherwise
    each attends to all of them. In self-attention (an encoder) the query tokens are again the last. In cross-attention
    they are tokens of other sequences, for instance all beams of one source, and may be more than `seq_lens[i]`.
    """

    block_tables: Tensor  #: int32 [num_seqs, max_blocks]; entries past a sequence's last block are arbitrary
    seq_lens: Tensor  #: int32 [num_seqs], tokens including this step's; at least 1 where there are query tokens
    query_start_loc: Tensor  #: int32 [num_seqs + 1]
    slot_mapping: Tensor  #: int64 [num_tokens], `block_id * block_size + offset` of each query token; or empty
    max_query_len: int
    max_seq_len: int
    causal: bool = True
    shared_prefixes: SharedPrefixes | None = None  #: prefixes that a backend may read once for several sequences

    def prefixes_for(self, sliding_window: int | None, position_bias: Tensor | None) -> SharedPrefixes | None:
        """The shared prefixes; None if a pass over them would not be the same for all sequences that share them.

        It is not if the window cuts into them, so that each sequence sees another part, nor with a bias, which depends
        on the length of each sequence. Without causality there is nothing to share: an encoder's K and V depend on the
        whole source, and in cross-attention the queries of a source are one sequence.
        """
        is_same = sliding_window is None or sliding_window >= self.max_seq_len
        return self.shared_prefixes if self.causal and position_bias is None and is_same else None

    def check_mask(self, num_heads: int, sliding_window: int | None, position_bias: Tensor | None) -> None:
        """
        Raises:
            ValueError: a window without causality, or a bias that is not contiguous float32 [num_heads, odd].
        """
        if sliding_window is not None and not self.causal:
            raise ValueError("a sliding window needs causal attention")
        if position_bias is None:
            return
        is_table = position_bias.dim() == 2 and len(position_bias) == num_heads and position_bias.shape[1] % 2 == 1
        if not is_table or position_bias.dtype != torch.float32 or not position_bias.is_contiguous():
            found = f"{position_bias.dtype} {list(position_bias.shape)}"
            raise ValueError(f"position_bias must be contiguous float32 [{num_heads}, 2 * reach - 1], not {found}")


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """The sequences of a batch cut into runs of neighbours that share a prefix (see `prefix_groups`).

    Every sequence is in a run; one that shares nothing is a run of its own with prefix 0. A prefix consists of whole
    blocks from before the step, so each query token of a run sees all of it.
    """

    block_tables: Tensor  #: int32 [num_runs, max_prefix_blocks]
    prefix_lens: Tensor  #: int32 [num_runs], tokens
    query_start_loc: Tensor  #: int32 [num_runs + 1]
    seq_prefix_lens: Tensor  #: int32 [num_seqs], the prefix of the sequence's run
    max_query_len: int  #: query tokens of the largest run
    max_prefix_len: int
    max_tail_len: int  #: no sequence has more tokens after its prefix

    @classmethod
    def from_groups(
        cls,
        groups: Sequence[PrefixGroup],
        block_tables: Sequence[Sequence[int]],
        query_start_loc: Sequence[int],
        block_size: int,
        device: torch.device,
    ) -> SharedPrefixes | None:
        """The tensors for the groups that `find_prefix_groups` chose among `block_tables`; None without groups."""
        if not groups:
            return None
        runs: list[PrefixGroup] = []
        next_seq = 0
        for group in groups:
            runs += [PrefixGroup(seq, 1, 0) for seq in range(next_seq, group.first_seq)]
            runs.append(group)
            next_seq = group.first_seq + group.num_seqs
        runs += [PrefixGroup(seq, 1, 0) for seq in range(next_seq, len(block_tables))]

        width = max(run.num_blocks for run in runs)
        tables = [[*block_tables[run.first_seq][: run.num_blocks], *[0] * (width - run.num_blocks)] for run in runs]
        starts = [query_start_loc[run.first_seq] for run in runs] + [query_start_loc[-1]]
        seq_prefix_lens = [run.num_blocks * block_size for run in runs for _ in range(run.num_seqs)]

        def on_device(numbers: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
            host = torch.tensor(numbers, dtype=torch.int32, pin_memory=device.type == "cuda")
            return host.to(device, non_blocking=True)

        return cls(
            block_tables=on_device(tables),
            prefix_lens=on_device([run.num_blocks * block_size for run in runs]),
            query_start_loc=on_device(starts),
            seq_prefix_lens=on_device(seq_prefix_lens),
            max_query_len=max(after - before for before, after in pairwise(starts)),
            max_prefix_len=width * block_size,
            max_tail_len=max(
                len(table) * block_size - prefix for table, prefix in zip(block_tables, seq_prefix_lens, strict=True)
            ),
        )


class Backend(Protocol):
    """The functions of a backend. The layout of its cache is its own, except that the first dimension is the layer:
    `write_kv` and `paged_attention` take `cache[layer]`."""

    def allocate_cache(
        self,
        shape: CacheShape,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        is_spare: bool = False,
    ) -> Tensor:
        """A cache of `num_blocks` uninitialised blocks; on a CPU that serves a GPU, in pinned memory.

        `is_spare`: most blocks may never be written, so memory should be taken only as they are.
        """
        ...

    def prefix_costs(self, attention: AttentionShape, device: torch.device) -> PrefixCosts | None:
        """When sharing prefixes pays off on `device`; None if this backend reads each sequence by itself."""
        ...

    def write_kv(self, key: Tensor, value: Tensor, layer_cache: Tensor, slot_mapping: Tensor) -> None:
        """Stores `key` and `value`, [num_tokens, num_kv_heads, head_size], at `slot_mapping`: int64 [num_tokens].

        If a head's value holds NaN or infinity, it is stored as 0, and the key as NaN. So exactly the queries that
        attend to the token get NaN; for the others, whose weight for it is 0, the value would give 0 * NaN = NaN.
        """
        ...

    def paged_attention(
        self,
        query: Tensor,
        layer_cache: Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        position_bias: Tensor | None = None,
    ) -> Tensor:
        """Attention of each query token over its sequence's tokens: up to itself if `batch.causal`, else all.

        Args:
            query: [num_tokens, num_heads, head_size]; query head h reads KV head `h // (num_heads // num_kv_heads)`.
            layer_cache: one layer of the cache, already holding the K/V of this step's tokens.
            scale: multiplies the scores.
            sliding_window: a token sees itself and the `sliding_window - 1` tokens before it; only if `batch.causal`.
            softcap: scores become `softcap * tanh(scores / softcap)`.
            sinks: [num_heads], one more score per head, of a key whose value is 0.
            position_bias: float32 [num_heads, 2 * reach - 1], added to the scaled scores, before `softcap`: entry
                `key position - query position + reach - 1`, and the first or the last where that lies outside. So the
                table need only reach as far as the bias changes (T5, arXiv 1910.10683). The query tokens are taken as
                the last of their sequence's tokens.

        Returns:
            [num_tokens, num_heads, head_size], in `query`'s dtype; computed in float32.
        """
        ...

    def copy_blocks(self, cache: Tensor, src: Tensor, dst: Tensor) -> None:
        """Copies whole blocks within a cache, all layers: int64 block ids [num_copies]; no id is in both lists."""
        ...

    def swap_blocks(self, src_cache: Tensor, dst_cache: Tensor, src: Tensor, dst: Tensor) -> None:
        """Copies whole blocks, all layers, from one cache to another: int64 block ids [num_copies]."""
        ...

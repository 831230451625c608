"""Attention that is not causal, and T5's relative position bias: every backend against the formula in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, cast

import pytest
import torch
from paged_batches import PagedCase, paged_case, relative_error
from pagedbatch_kernels import reference, triton_backend
from pagedbatch_kernels.cpu import build
from pagedbatch_kernels.cpu.backend import CpuBackend
from pagedbatch_kernels.interface import Backend, SharedPrefixes
from pagedbatch_kernels.launch import LaunchConfig, Tile
from pagedbatch_kernels.prefix_groups import PrefixGroup
from pagedbatch_kernels.triton_attention import attend as triton_attend
from pagedbatch_kernels.triton_attention import plan_passes
from torch import Tensor

HAS_COMPILER = build.can_load()
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler here to build the kernel with")
GPU = torch.device("cuda" if torch.cuda.is_available() else "cpu")
#: Of the largest value, as in test_cpu_attention.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-2}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)

#: (seq_len, query_len). An encoder's sources around the borders of blocks and chunks, one with nothing to compute.
ENCODER = [(1, 1), (7, 7), (16, 16), (17, 17), (40, 0), (65, 65), (150, 150)]
#: Sources with the queries of 0 to 40 beams and samples: fewer and more than tokens.
CROSS = [(5, 40), (20, 5), (33, 0), (1, 7), (64, 6), (130, 10), (63, 1), (0, 0), (200, 12)]
#: A decoder's steps: first tokens, whole prompts, chunks of longer ones, nothing.
DECODER = [(1, 1), (8, 1), (17, 17), (40, 0), (40, 5), (65, 1), (150, 150), (200, 30), (300, 1)]


@cache
def backend(name: str) -> Backend:
    if name == "cpu":
        return CpuBackend()
    return cast(Backend, {"reference": reference, "triton": triton_backend}[name])


BACKENDS = pytest.mark.parametrize("name", ["reference", pytest.param("cpu", marks=needs_compiler), "triton"])


def case_for(name: str, lens: list[tuple[int, int]], *, causal: bool, **options: Any) -> PagedCase:
    """In Triton's interpreter the short sequences only."""
    if name == "triton" and GPU.type == "cpu":
        lens = [(min(seq_len, 27), min(query_len, 27)) for seq_len, query_len in lens]
    case = paged_case(lens, device=GPU if name == "triton" else "cpu", **options)
    batch = replace(case.batch, causal=causal)
    # Cross-attention stores no token in this step.
    return replace(case, batch=batch if causal else replace(batch, slot_mapping=batch.slot_mapping[:0]))


def attend(name: str, case: PagedCase, **options: Any) -> Tensor:
    return backend(name).paged_attention(case.query, case.layer_cache, case.batch, **options)


def expected(
    case: PagedCase,
    *,
    scale: float = 0.3,
    bias_of: Callable[[Tensor], Tensor] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(scale * Q * K^T + bias) * V, one sequence at a time; `bias_of` key minus query positions."""
    output = torch.zeros_like(case.query, dtype=torch.float64)
    key, value = case.layer_cache.double()
    queries_per_kv = case.query.shape[1] // key.shape[2]
    for i, seq_len in enumerate(case.batch.seq_lens.tolist()):
        tokens = slice(*case.query_start_loc[i : i + 2])
        query_len = tokens.stop - tokens.start
        if query_len == 0:
            continue
        keys, values = (
            each[case.block_tables[i]].flatten(0, 1)[:seq_len].repeat_interleave(queries_per_kv, 1)
            for each in (key, value)
        )
        scores = torch.einsum("qhd,khd->hqk", case.query[tokens].double(), keys) * scale
        position = torch.arange(seq_len - query_len, seq_len, device=keys.device)[:, None]
        offsets = torch.arange(seq_len, device=keys.device) - position
        if bias_of is not None:
            scores += bias_of(offsets).to(scores)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if case.batch.causal:
            scores = scores.masked_fill(offsets > 0, -math.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, query_len, 1)], dim=2)
        weights = scores.softmax(dim=2)[:, :, :seq_len]
        output[tokens] = torch.einsum("hqk,khd->qhd", weights, values)
    return output


def check(name: str, case: PagedCase, bias: Bias | None = None, **options: Any) -> None:
    options = {"scale": 0.3, **options}
    wanted = expected(case, bias_of=bias, **options)
    found = attend(name, case, position_bias=None if bias is None else bias.table.to(case.query.device), **options)
    assert found.dtype == case.query.dtype
    assert found.shape == case.query.shape
    assert relative_error(found, wanted) < TOLERANCE[case.query.dtype]


class Bias:
    """T5's bias: an embedding of buckets that are exact for near keys and grow logarithmically up to `max_distance`."""

    def __init__(
        self, num_heads: int, *, bidirectional: bool, reach: int | None = None, max_distance: int = 20
    ) -> None:
        """`reach`: of the table, by default as far as the buckets differ; else greater distances count as its last."""
        self._bidirectional, self._max_distance = bidirectional, max_distance
        self._max_offset = reach - 1 if reach else 2**31
        self._embedding = torch.randn(16, num_heads, generator=torch.Generator().manual_seed(1)) * 2
        reach = reach or max_distance + 1
        self.table = self(torch.arange(1 - reach, reach)).contiguous()

    def __call__(self, offsets: Tensor) -> Tensor:
        """[num_heads, *offsets.shape], for key minus query positions."""
        offsets = offsets.cpu().clamp(-self._max_offset, self._max_offset)
        return self._embedding.T[:, self._bucket(offsets)]

    def _bucket(self, offsets: Tensor) -> Tensor:
        num_buckets, first = 16, torch.zeros_like(offsets)
        if self._bidirectional:
            num_buckets = 8
            first = (offsets > 0) * num_buckets
            distance = offsets.abs()
        else:
            distance = -offsets.clamp(max=0)
        exact = num_buckets // 2
        growth = (distance.clamp(min=1) / exact).log() / math.log(self._max_distance / exact)
        far = (exact + growth * (num_buckets - exact)).long().clamp(max=num_buckets - 1)
        return first + torch.where(distance < exact, distance, far)


@BACKENDS
@DTYPES
@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("lens", [ENCODER, CROSS], ids=["encoder", "cross"])
def test_each_query_token_sees_all_keys(
    name: str, lens: list[tuple[int, int]], block_size: int, dtype: torch.dtype
) -> None:
    check(name, case_for(name, lens, causal=False, block_size=block_size, dtype=dtype))


@BACKENDS
@pytest.mark.parametrize("queries_per_kv", [1, 3])
@pytest.mark.parametrize("head_size", [7, 64, 80])
def test_heads_of_cross_attention(name: str, head_size: int, queries_per_kv: int) -> None:
    check(name, case_for(name, CROSS, causal=False, head_size=head_size, queries_per_kv=queries_per_kv), softcap=5.0)


@BACKENDS
def test_sinks_count_without_causality(name: str) -> None:
    case = case_for(name, CROSS, causal=False)
    check(name, case, sinks=torch.tensor([3.0, -30.0, 0.5, -1.0], device=case.query.device))


@BACKENDS
@DTYPES
@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize(("lens", "causal"), [(ENCODER, False), (DECODER, False), (DECODER, True)])
def test_a_bucketed_bias(
    name: str, lens: list[tuple[int, int]], causal: bool, block_size: int, dtype: torch.dtype
) -> None:
    """Its table ends where the buckets do, at distances of 20, and sequences are longer."""
    case = case_for(name, lens, causal=causal, block_size=block_size, dtype=dtype)
    check(name, case, Bias(4, bidirectional=not causal))


@BACKENDS
@pytest.mark.parametrize("scale", [1.0, -0.5, 0.0])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(("queries_per_kv", "head_size"), [(1, 64), (3, 24), (2, 7)])
def test_a_bias_with_other_options(
    name: str, scale: float, softcap: float | None, queries_per_kv: int, head_size: int
) -> None:
    """It is added after the scale, which T5 does not have, and before the cap."""
    bias = Bias(2 * queries_per_kv, bidirectional=True)
    for causal in (False, True):
        case = case_for(name, DECODER, causal=causal, queries_per_kv=queries_per_kv, head_size=head_size)
        check(name, case, bias, scale=scale, softcap=softcap)


@BACKENDS
@pytest.mark.parametrize("reach", [1, 2, 65, 400])
def test_a_table_may_reach_any_distance(name: str, reach: int) -> None:
    """From one entry for all distances, to more than the sequences have."""
    bias = Bias(4, bidirectional=True, reach=reach, max_distance=200)
    for causal in (False, True):
        check(name, case_for(name, DECODER, causal=causal), bias)


@BACKENDS
def test_a_bias_in_a_window(name: str) -> None:
    case, bias = case_for(name, DECODER, causal=True), Bias(4, bidirectional=False)
    for window in (1, 16, 70):

        def in_window(offsets: Tensor, window: int = window) -> Tensor:
            return torch.where(-offsets.cpu() < window, bias(offsets), -math.inf)

        found = attend(name, case, scale=0.3, sliding_window=window, position_bias=bias.table.to(case.query.device))
        assert relative_error(found, expected(case, bias_of=in_window)) < 1e-5


@pytest.mark.parametrize("split_len", [16, 32])
def test_triton_in_splits(split_len: int) -> None:
    """Each part adds the bias of its own keys; the sinks count once."""
    case, bias = case_for("triton", CROSS, causal=False), Bias(4, bidirectional=True)
    sinks = torch.tensor([3.0, -3.0, 0.5, -1.0], device=GPU)
    longest = int(case.batch.seq_lens.max())
    config = LaunchConfig(Tile(16, 16, 4, 3), num_splits=-(-longest // split_len), split_len=split_len)
    table = bias.table.to(GPU)
    passes = plan_passes(case.query, case.layer_cache, case.batch, None, table)
    found = triton_attend(case.query, case.layer_cache, passes, [config], 0.3, None, None, sinks, table)
    assert relative_error(found, expected(case, bias_of=bias, sinks=sinks)) < 1e-5


@BACKENDS
def test_a_bias_takes_no_shared_pass(name: str) -> None:
    """The queries of a shared prefix are at other distances from it."""
    num_blocks = 3 if name == "triton" else 10  # in C++ a prefix is shared in chunks of 64 tokens
    lens = [(8 * num_blocks + more, query_len) for more, query_len in ((1, 1), (2, 1), (3, 1), (3, 2))]
    case = case_for(name, lens, causal=True, shared_blocks=num_blocks)
    groups = [PrefixGroup(0, 4, num_blocks)]
    shared = SharedPrefixes.from_groups(groups, case.block_tables, case.query_start_loc, 8, case.query.device)
    check(name, replace(case, batch=replace(case.batch, shared_prefixes=shared)), Bias(4, bidirectional=False))


@needs_compiler
@DTYPES
@pytest.mark.parametrize("block_size", [8, 16])
def test_a_sequence_is_the_same_bits_alone_and_in_any_batch(dtype: torch.dtype, block_size: int) -> None:
    """Also with the queries of a source in parts, and a decoder's tokens one by one: a run may compute them again."""
    table = Bias(4, bidirectional=True).table
    for lens, causal, position_bias in ((ENCODER, False, table), (CROSS, False, None), (DECODER, True, table)):
        case = case_for("cpu", lens, causal=causal, block_size=block_size, dtype=dtype)
        together = attend("cpu", case, scale=1.0, position_bias=position_bias)
        for i, (seq_len, query_len) in enumerate(lens):
            # Without a bias or causality, a query's position is nothing; without causality keys can't be left out.
            cuts = [query_len] if not causal and position_bias is not None else [query_len, query_len // 3, 1]
            for end in {cut for cut in cuts if 0 < cut <= query_len}:
                start = case.query_start_loc[i]
                batch = replace(
                    case.batch,
                    block_tables=case.batch.block_tables[i : i + 1],
                    seq_lens=torch.tensor([seq_len - (query_len - end if causal else 0)], dtype=torch.int32),
                    query_start_loc=torch.tensor([0, end], dtype=torch.int32),
                )
                alone = replace(case, query=case.query[start : start + end], batch=batch)
                found = attend("cpu", alone, scale=1.0, position_bias=position_bias)
                assert torch.equal(found, together[start : start + end])


@needs_compiler
def test_float16_goes_to_the_reference() -> None:
    case = case_for("cpu", DECODER, causal=False, dtype=torch.float16)
    check("cpu", case, Bias(4, bidirectional=True))


@BACKENDS
def test_what_does_not_fit_is_refused(name: str) -> None:
    case = case_for(name, [(9, 1), (12, 4)], causal=False)
    with pytest.raises(ValueError, match="a sliding window needs causal attention"):
        attend(name, case, scale=1.0, sliding_window=4)
    for bias in (torch.zeros(4, 6), torch.zeros(3, 7), torch.zeros(4), torch.zeros(4, 7).half(), torch.zeros(7, 4).T):
        with pytest.raises(ValueError, match=r"position_bias must be contiguous float32 \[4, 2 \* reach - 1\], not"):
            attend(name, case, scale=1.0, position_bias=bias.to(case.query.device))

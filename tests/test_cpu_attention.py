"""The native CPU attention kernel against the torch reference, and the whole engine on it; skipped without a compiler.

It is built once into the user's cache folder, as by a run.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Run, run_engine
from paged_batches import PagedCase, paged_case, relative_error
from pagedbatch_kernels import reference
from pagedbatch_kernels.cpu import build
from pagedbatch_kernels.cpu.backend import CpuBackend
from pagedbatch_kernels.interface import AttentionBatch, AttentionShape, CacheShape, SharedPrefixes
from pagedbatch_kernels.prefix_groups import PrefixGroup, find_prefix_groups
from torch import Tensor

from pagedbatch.params import GenerationParams
from pagedbatch.sequence import Request

pytestmark = pytest.mark.skipif(not build.can_load(), reason="no C++ compiler here to build the kernel with")

CPU = torch.device("cpu")
#: Of the largest value. bfloat16 rounds by up to 2^-9: the kernel its weights and their share in the sum, the reference
#: and the kernel their results, together 8e-3. float16 is the reference itself.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-2}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
#: Of 8 tokens, which are packed when they are read, and of 16, which are kept packed.
BLOCKS = pytest.mark.parametrize("block_size", [8, 16])

#: (seq_len, query_len): first tokens, decodes around the borders of blocks and of chunks of 64 tokens, whole
#: prompts of one tile and of several, chunks of longer ones.
RAGGED = [(1, 1), (7, 1), (8, 1), (9, 1), (17, 17), (40, 5), (63, 1), (64, 1), (65, 1), (150, 150), (200, 90), (300, 1)]


@cache
def backend() -> CpuBackend:
    return CpuBackend()


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def stored(layer_cache: Tensor) -> Tensor:
    """The reference's cache as the backend keeps it, written slot by slot: packed, where the sizes allow it.

    Slots of NaN are not written, as their values would be stored as 0: they stay the NaN that was there before.
    """
    _, num_blocks, block_size, num_kv_heads, head_size = layer_cache.shape
    shape = CacheShape(2, block_size, num_kv_heads, head_size)
    cache = backend().allocate_cache(shape, num_blocks, layer_cache.dtype, CPU)[1].fill_(torch.nan)
    key, value = layer_cache.flatten(1, 2)
    slots = torch.isfinite(value).all(dim=2).all(dim=1).nonzero().flatten()
    backend().write_kv(key[slots], value[slots], cache, slots)
    return cache


def attend(case: PagedCase, **options: Any) -> Tensor:
    cache = stored(case.layer_cache)
    return backend().paged_attention(case.query, cache, case.batch, **{"scale": 0.3, **options})


def check(case: PagedCase, tolerance: float | None = None, **options: Any) -> None:
    """The kernel's result against the reference's."""
    actual = attend(case, **options)
    expected = reference.paged_attention(case.query, case.layer_cache, case.batch, **{"scale": 0.3, **options})
    assert actual.dtype == case.query.dtype
    assert actual.shape == case.query.shape
    assert relative_error(actual, expected) < (tolerance or TOLERANCE[case.query.dtype])


@BLOCKS
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_a_ragged_mix_of_prefill_and_decode(threads: int, dtype: torch.dtype, block_size: int) -> None:
    check(paged_case(RAGGED, block_size=block_size, dtype=dtype))


@DTYPES
@pytest.mark.parametrize("block_size", [1, 8, 16, 24, 128])
def test_lengths_around_block_borders(block_size: int, dtype: torch.dtype) -> None:
    lens = [(block_size + by, 1) for by in (0, 1)] + [(2 * block_size + by, block_size) for by in (-1, 0, 1)]
    check(paged_case(lens, block_size=block_size, num_kv_heads=1, dtype=dtype))


@BLOCKS
@DTYPES
@pytest.mark.parametrize("head_size", [1, 7, 24, 32, 33, 64, 72, 80, 96, 112, 128, 192, 256])
def test_every_head_size(head_size: int, dtype: torch.dtype, block_size: int) -> None:
    check(paged_case([(9, 1), (70, 6)], block_size=block_size, head_size=head_size, dtype=dtype), scale=head_size**-0.5)


@BLOCKS
@DTYPES
@pytest.mark.parametrize("queries_per_kv", [1, 3, 4, 7, 8, 20, 71])
def test_every_ratio_of_query_to_kv_heads(
    threads: int, queries_per_kv: int, dtype: torch.dtype, block_size: int
) -> None:
    """71 rows are more than a tile of one token is meant for."""
    check(paged_case([(9, 1), (12, 12), (90, 30)], block_size=block_size, queries_per_kv=queries_per_kv, dtype=dtype))


@DTYPES
@pytest.mark.parametrize("queries_per_kv", [1, 3])
def test_long_prompts_in_tiles_of_many_rows(threads: int, queries_per_kv: int, dtype: torch.dtype) -> None:
    check(paged_case([(700, 700), (900, 500)], queries_per_kv=queries_per_kv, block_size=16, dtype=dtype))


@BLOCKS
@DTYPES
@pytest.mark.parametrize("window", [1, 3, 16, 17, 64, 65, 1000])
def test_sliding_window(threads: int, window: int, dtype: torch.dtype, block_size: int) -> None:
    check(paged_case(RAGGED, block_size=block_size, dtype=dtype), sliding_window=window)


@BLOCKS
@DTYPES
@pytest.mark.parametrize("window", [1, 16, 70])
def test_blocks_that_left_the_window_are_not_read(window: int, dtype: torch.dtype, block_size: int) -> None:
    """Their table entries are -1 and would lead outside the cache; the poison is in all that is not visible."""
    case = paged_case(RAGGED, block_size=block_size, dtype=dtype)
    expected = reference.paged_attention(case.query, case.layer_cache, case.batch, scale=0.3, sliding_window=window)
    tables, layer_cache = case.batch.block_tables.clone(), case.layer_cache.clone()
    for i, (seq_len, query_len) in enumerate(RAGGED):
        first_visible = max(0, seq_len - query_len - window + 1)
        dropped = tables[i, : first_visible // block_size].clone()
        layer_cache[:, dropped] = torch.nan
        tables[i, : first_visible // block_size] = -1
        layer_cache[:, tables[i, first_visible // block_size], : first_visible % block_size] = torch.nan
    dropped_case = replace(case, layer_cache=layer_cache, batch=replace(case.batch, block_tables=tables))
    assert relative_error(attend(dropped_case, sliding_window=window), expected) < TOLERANCE[dtype]


@BLOCKS
@DTYPES
@pytest.mark.parametrize("scale", [4.0, -4.0])
@pytest.mark.parametrize("softcap", [2.0, 50.0])
def test_soft_cap(softcap: float, scale: float, dtype: torch.dtype, block_size: int) -> None:
    """At a scale where scores reach +-50, so that both caps bend them."""
    check(paged_case(RAGGED, block_size=block_size, dtype=dtype), softcap=softcap, scale=scale)


@BLOCKS
@DTYPES
def test_sinks(threads: int, dtype: torch.dtype, block_size: int) -> None:
    """One sink far above all scores, one far below, others among them."""
    check(paged_case(RAGGED, block_size=block_size, dtype=dtype), sinks=torch.tensor([30.0, -30.0, 0.5, -1.0]))


@BLOCKS
def test_everything_at_once_in_bfloat16(threads: int, block_size: int) -> None:
    case = paged_case(RAGGED, block_size=block_size, head_size=80, queries_per_kv=3, dtype=torch.bfloat16)
    check(case, sliding_window=16, softcap=5.0, sinks=torch.linspace(-1, 1, 6, dtype=torch.bfloat16))


@BLOCKS
def test_scores_far_apart_and_far_from_zero(block_size: int) -> None:
    """Where e^score has no float, and where all but one weight vanish. A score of 2,000 is rounded by up to 1e-4."""
    check(paged_case(RAGGED, block_size=block_size), tolerance=1e-3, scale=300.0)


@BLOCKS
@DTYPES
@pytest.mark.parametrize("step", [-1.0, 0.03125, 0.25, 1.0])
def test_scores_that_rise_or_fall_along_the_sequence(step: float, dtype: torch.dtype, block_size: int) -> None:
    """So that row_max moves never, in some chunks, or in each; the scores are exact."""
    case = paged_case(RAGGED, block_size=block_size, dtype=dtype)
    case.query[:] = 1.0
    for (seq_len, _), table in zip(RAGGED, case.block_tables, strict=True):
        for position in range(seq_len):
            case.layer_cache[0, table[position // block_size], position % block_size] = 0.0
            case.layer_cache[0, table[position // block_size], position % block_size, :, 0] = position // 2
    check(case, scale=step)


@BLOCKS
@DTYPES
@pytest.mark.parametrize("window", [1, 3, None])
def test_equal_values_come_out_as_they_are(window: int | None, dtype: torch.dtype, block_size: int) -> None:
    """Whatever their weights: in bfloat16 because the sum of weights is that of the rounded ones."""
    case = paged_case(RAGGED, block_size=block_size, dtype=dtype)
    value = torch.randn(case.layer_cache.shape[3:]).to(dtype)
    case.layer_cache[1] = value
    expected = value.repeat_interleave(2, dim=0).expand_as(case.query)
    torch.testing.assert_close(
        attend(case, sliding_window=window), expected, rtol=0.0 if dtype == torch.bfloat16 else 2e-6, atol=0.0
    )


@BLOCKS
def test_nan_in_a_visible_key_is_not_hidden(block_size: int) -> None:
    case = paged_case([(20, 1), (20, 1)], block_size=block_size)
    case.layer_cache[0, case.block_tables[0][1], 2] = torch.nan
    output = attend(case)
    assert output[0].isnan().all()
    assert not output[1].isnan().any()


@BLOCKS
def test_queries_that_are_views_of_a_fused_projection(block_size: int) -> None:
    case = paged_case(RAGGED, block_size=block_size)
    fused = torch.cat([torch.zeros_like(case.query), case.query], dim=2)
    check(replace(case, query=fused[..., 32:]))
    check(replace(case, query=case.query.transpose(0, 1).contiguous().transpose(0, 1)))
    check(replace(case, query=case.query.transpose(1, 2).contiguous().transpose(1, 2)))


def share(case: PagedCase, groups: list[PrefixGroup]) -> PagedCase:
    block_size = case.layer_cache.shape[2]
    shared = SharedPrefixes.from_groups(groups, case.block_tables, case.query_start_loc, block_size, CPU)
    return replace(case, batch=replace(case.batch, shared_prefixes=shared))


#: Five forks of a prompt of 20 blocks of 8: 160 tokens, two chunks and a half.
FORKED = [(161, 1), (168, 1), (200, 1), (204, 40), (300, 1)]


@BLOCKS
@DTYPES
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"sinks": True}, {"sliding_window": 100}], ids=str)
def test_a_shared_prefix_changes_no_bit(
    threads: int, options: dict[str, Any], dtype: torch.dtype, block_size: int
) -> None:
    if "sinks" in options:
        options = {"sinks": torch.tensor([1.0, -2.0, 0.5, 3.0])}
    of_8 = block_size // 8
    case = paged_case(FORKED, block_size=block_size, shared_blocks=20 // of_8, dtype=dtype)
    check(case, **options)
    plain = attend(case, **options)
    for groups in (
        [PrefixGroup(0, 5, 20 // of_8)],
        [PrefixGroup(1, 2, 16 // of_8), PrefixGroup(3, 2, 8 // of_8)],
        [PrefixGroup(0, 5, 4 // of_8)],
    ):
        assert torch.equal(attend(share(case, groups), **options), plain)


@BLOCKS
def test_a_window_longer_than_all_sequences_hides_no_shared_prefix(block_size: int) -> None:
    """However many queries share it: 44 tokens after a prefix of 160, in a window of 161 tokens."""
    case = paged_case([(161, 1)] * 44, block_size=block_size, shared_blocks=160 // block_size)
    shared = share(case, [PrefixGroup(0, 44, 160 // block_size)])
    assert torch.equal(attend(shared, sliding_window=161), attend(case, sliding_window=161))


def test_the_plan_finds_what_pays() -> None:
    case = paged_case([(405 + i, 1) for i in range(16)], shared_blocks=50)
    costs = backend().prefix_costs(AttentionShape(4, 2, 32, 4), CPU)
    groups = find_prefix_groups(case.block_tables, [1] * 16, [404 + i for i in range(16)], 8, costs)
    assert groups == (PrefixGroup(0, 16, 50),)
    check(share(case, list(groups)))
    assert find_prefix_groups(case.block_tables[:2], [1] * 2, [404, 405], 8, costs) == ()


@BLOCKS
@DTYPES
@pytest.mark.parametrize("options", [{}, {"sliding_window": 30}, {"softcap": 2.0}], ids=str)
def test_a_sequence_is_the_same_bits_alone_and_in_any_batch(
    threads: int, options: dict[str, Any], dtype: torch.dtype, block_size: int
) -> None:
    """Also a prompt's tokens computed at once or one by one: a run that was preempted computes them again."""
    case = paged_case(RAGGED, block_size=block_size, queries_per_kv=3, dtype=dtype)
    together = attend(case, **options)
    for i, (seq_len, query_len) in enumerate(RAGGED):
        for first, count in {(0, query_len), (query_len - 1, 1), (query_len // 2, query_len - query_len // 2)}:
            start = case.query_start_loc[i] + first
            batch = AttentionBatch(
                block_tables=case.batch.block_tables[i : i + 1],
                seq_lens=torch.tensor([seq_len - query_len + first + count], dtype=torch.int32),
                query_start_loc=torch.tensor([0, count], dtype=torch.int32),
                slot_mapping=torch.empty(0, dtype=torch.int64),
                max_query_len=count,
                max_seq_len=seq_len,
            )
            alone = replace(case, query=case.query[start : start + count], batch=batch)
            assert torch.equal(attend(alone, **options), together[start : start + count])


@BLOCKS
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_cache_functions_do_what_the_reference_does(dtype: torch.dtype, block_size: int) -> None:
    """Blocks copied and swapped hold what attention over the reference's says."""
    shape = CacheShape(3, block_size, 2, 16)
    native, native_host = (backend().allocate_cache(shape, num_blocks, dtype, CPU).fill_(-1.0) for num_blocks in (6, 3))
    oracle, oracle_host = (reference.allocate_cache(shape, num_blocks, dtype, CPU).fill_(-1.0) for num_blocks in (6, 3))
    key, value, _ = torch.randn(7, 2, 48).to(dtype).split(16, dim=2)
    value = value.transpose(0, 1).contiguous().transpose(0, 1)
    slots = torch.tensor([block_size + 1, 0, 6 * block_size - 1, 5, 6, 7, 5 * block_size])
    for functions, kv_cache, host in ((backend(), native, native_host), (reference, oracle, oracle_host)):
        for layer_cache in kv_cache:
            functions.write_kv(key, value, layer_cache, slots)
        functions.copy_blocks(kv_cache, torch.tensor([0, 0, 5]), torch.tensor([3, 4, 2]))
        functions.swap_blocks(kv_cache, host, torch.tensor([5, 1]), torch.tensor([0, 2]))
        functions.swap_blocks(host, kv_cache, torch.tensor([0]), torch.tensor([1]))
    for mine, expected in ((native, oracle), (native_host, oracle_host)):
        for layer_cache, wanted in zip(mine, expected, strict=True):
            assert torch.equal(layer_cache, wanted if dtype == torch.float16 else stored(wanted))


def test_a_cache_may_have_no_blocks() -> None:
    assert backend().allocate_cache(CacheShape(3, 4, 2, 5), 0, torch.float32, CPU).shape == (3, 2, 0, 4, 2, 5)
    assert backend().allocate_cache(CacheShape(3, 16, 2, 32), 0, torch.bfloat16, CPU).shape == (3, 2, 0, 2, 8, 32, 2)


def test_a_packed_block_is_one_stretch_of_memory() -> None:
    """So that the first blocks to be written, of all layers, take the first pages."""
    shape = CacheShape(3, 32, 2, 48)
    cache = backend().allocate_cache(shape, 5, torch.bfloat16, CPU)
    assert cache.stride(2) * cache.itemsize == shape.block_bytes(torch.bfloat16)


def test_a_cache_too_large_for_the_machine_is_a_memory_error() -> None:
    with pytest.raises(MemoryError):
        backend().allocate_cache(CacheShape(1, 16, 1, 64), 2**45, torch.float32, CPU)


def test_what_does_not_fit_is_refused() -> None:
    case = paged_case([(9, 1), (12, 4)])
    changes: list[tuple[str, dict[str, Any]]] = [
        ("head size", {"query": torch.zeros(5, 4, 64)}),
        ("no multiple", {"query": case.query[:, :3]}),
        ("both float32 or both bfloat16", {"query": case.query.bfloat16()}),
        ("sinks", {"sinks": torch.zeros(3)}),
        ("disagree", {"batch": replace(case.batch, seq_lens=case.batch.seq_lens[:1])}),
        ("int32", {"batch": replace(case.batch, seq_lens=case.batch.seq_lens.long())}),
        ("not contiguous", {"layer_cache": case.layer_cache.transpose(2, 3)}),
    ]
    arguments = {"query": case.query, "layer_cache": case.layer_cache, "batch": case.batch, "scale": 1.0}
    for message, change in changes:
        with pytest.raises(ValueError, match=message):
            backend().paged_attention(**{**arguments, **change})
    token = torch.zeros(1, 2, 32)
    for slot in (-1, 8 * case.layer_cache.shape[1]):
        with pytest.raises(IndexError, match="a slot lies outside"):
            backend().write_kv(token, token, case.layer_cache, torch.tensor([slot]))
    with pytest.raises(ValueError, match="K or V"):
        backend().write_kv(token, token.double(), case.layer_cache, torch.tensor([0]))
    with pytest.raises(IndexError, match="a block lies outside"):
        backend().copy_blocks(case.layer_cache[None], torch.tensor([0]), torch.tensor([99]))
    with pytest.raises(ValueError, match="1 source blocks for 2 destinations"):
        backend().copy_blocks(case.layer_cache[None], torch.tensor([0]), torch.tensor([1, 2]))


def requests() -> list[Request]:
    """Greedy requests, four samples and four beams; some share a prefix of more than a chunk."""
    rng = random.Random(5)
    prefix = [1, *(rng.randrange(4, 256) for _ in range(80))]
    kinds = [
        GenerationParams(max_tokens=40, ignore_eos=True),
        GenerationParams(n=4, temperature=0.8, top_p=0.9, max_tokens=40, ignore_eos=True),
        GenerationParams(num_beams=4, n=4, max_tokens=40),
    ]
    return [
        Request(i, [*(prefix if i % 2 else [1]), *(rng.randrange(4, 256) for _ in range(9 * i))], kinds[i % 3])
        for i in range(9)
    ]


@cache
def torch_run(path: Path) -> Run:
    return run_engine(path, requests(), attention="torch", num_blocks=2000)


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("model", ["rand_model_path", "stories_path"])
def test_a_run_is_the_torch_backends(request: pytest.FixtureRequest, model: str, preemption: str) -> None:
    path: Path = request.getfixturevalue(model)
    expected = torch_run(path)
    run = run_engine(
        path, requests(), attention="cpu", num_blocks=48, num_swap_blocks=200, preemption=preemption, block_size=16
    )
    assert run.counters.preemptions_swap + run.counters.preemptions_recompute > 0
    assert run.token_ids() == expected.token_ids()
    for request_id, result in run.outputs.items():
        for output, wanted in zip(result.outputs, expected.outputs[request_id].outputs, strict=True):
            assert output.cumulative_logprob == pytest.approx(wanted.cumulative_logprob, abs=1e-3, rel=1e-5)

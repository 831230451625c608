"""The Triton attention kernel against the torch reference, on a GPU where there is one, else in Triton's interpreter.

The interpreter is chosen when triton is first imported, so `conftest` sets it for the whole test run; nothing else in
the suite compiles a kernel.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from paged_batches import PagedCase, paged_case, relative_error
from pagedbatch_kernels import reference, triton_attention
from pagedbatch_kernels.interface import SharedPrefixes
from pagedbatch_kernels.launch import LaunchConfig, Tile
from pagedbatch_kernels.prefix_groups import PrefixCosts, PrefixGroup, find_prefix_groups
from torch import Tensor
from triton.runtime.errors import OutOfResources

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-2}

#: (seq_len, query_len): a first token, decodes around a block border of 8, a whole prompt, a chunk of a longer one.
RAGGED = [(1, 1), (7, 1), (8, 1), (9, 1), (17, 17), (40, 5), (33, 1)]
SMALL = LaunchConfig(Tile(16, 16, 4, 3), num_splits=1, split_len=1 << 20)


def check(case: PagedCase, *, configs: list[LaunchConfig] | None = None, **options: Any) -> None:
    """The kernel's result, with the given launch or the chosen one, against the reference's."""
    options = {"scale": 0.3, **options}
    expected = reference.paged_attention(case.query, case.layer_cache, case.batch, **options)
    if configs is None:
        actual = triton_attention.paged_attention(case.query, case.layer_cache, case.batch, **options)
    else:
        passes = triton_attention.plan_passes(case.query, case.layer_cache, case.batch, options.get("sliding_window"))
        actual = triton_attention.attend(case.query, case.layer_cache, passes, configs, **options)
    assert actual.dtype == case.query.dtype
    assert actual.shape == case.query.shape
    assert relative_error(actual, expected) < TOLERANCE[case.query.dtype]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_a_ragged_mix_of_prefill_and_decode(dtype: torch.dtype) -> None:
    check(paged_case(RAGGED, dtype=dtype, device=DEVICE))


@pytest.mark.parametrize("block_size", [8, 16, 24, 128])
def test_lengths_around_block_borders(block_size: int) -> None:
    lens = [(block_size + by, 1) for by in (-1, 0, 1)] + [(block_size + by, block_size // 2) for by in (-1, 0, 1)]
    check(paged_case(lens, block_size=block_size, num_kv_heads=1, device=DEVICE))


@pytest.mark.parametrize("head_size", [32, 64, 80, 96, 112, 128, 192, 256])
def test_every_head_size(head_size: int) -> None:
    check(paged_case([(9, 1), (12, 4)], head_size=head_size, num_kv_heads=1, device=DEVICE), scale=head_size**-0.5)


@pytest.mark.parametrize("queries_per_kv", [1, 3, 7, 8, 20])
def test_every_ratio_of_query_to_kv_heads(queries_per_kv: int) -> None:
    """7 and 20 leave rows of a tile empty; packed rows cross token borders within a tile."""
    check(paged_case([(9, 1), (12, 12), (30, 3)], queries_per_kv=queries_per_kv, device=DEVICE))


@pytest.mark.parametrize("window", [1, 3, 16, 17])
@pytest.mark.parametrize("splits", [1, 3])
def test_sliding_window(window: int, splits: int) -> None:
    config = replace(SMALL, num_splits=splits, split_len=16 if splits > 1 else 1 << 20)
    check(paged_case(RAGGED, num_kv_heads=1, device=DEVICE), configs=[config], sliding_window=window)


@pytest.mark.parametrize("softcap", [2.0, 50.0])
def test_soft_cap(softcap: float) -> None:
    """At a scale where scores reach +-50, so that both caps bend them."""
    check(paged_case(RAGGED, device=DEVICE), softcap=softcap, scale=4.0)


@pytest.mark.parametrize("splits", [1, 3])
def test_sinks(splits: int) -> None:
    """One sink far above all scores, one far below, others among them."""
    sinks = torch.tensor([30.0, -30.0, 0.5, -1.0], device=DEVICE)
    config = replace(SMALL, num_splits=splits, split_len=16 if splits > 1 else 1 << 20)
    check(paged_case(RAGGED, device=DEVICE), configs=[config], sinks=sinks)


def test_everything_at_once_in_bfloat16() -> None:
    case = paged_case(RAGGED, head_size=80, queries_per_kv=3, dtype=torch.bfloat16, device=DEVICE)
    sinks = torch.linspace(-1, 1, 6, device=DEVICE, dtype=torch.bfloat16)
    check(case, sliding_window=16, softcap=5.0, sinks=sinks)


@pytest.mark.parametrize("split_len", [16, 32, 48])
def test_splits_of_a_long_context(split_len: int) -> None:
    """Short sequences leave later splits empty; those must weigh nothing."""
    config = replace(SMALL, num_splits=-(-150 // split_len), split_len=split_len)
    check(paged_case([(150, 1), (3, 1), (100, 2)], num_kv_heads=1, device=DEVICE), configs=[config])


def test_the_chooser_splits_a_lone_long_row() -> None:
    case = paged_case([(700, 1)], block_size=16, num_kv_heads=1, device=DEVICE)
    (one,) = triton_attention.plan_passes(case.query, case.layer_cache, case.batch, None)
    limits = triton_attention.device_limits(case.query.device)
    assert triton_attention.choose_config(one.shape, limits).num_splits > 1
    check(case)


@pytest.mark.parametrize("tile", [Tile(16, 64, 4, 5), Tile(64, 32, 8, 3), Tile(128, 64, 8, 5)], ids=str)
def test_tiles_of_other_sizes(tile: Tile) -> None:
    check(paged_case(RAGGED, device=DEVICE), configs=[replace(SMALL, tile=tile)])


def test_queries_that_are_views_of_a_fused_projection() -> None:
    case = paged_case(RAGGED, device=DEVICE)
    fused = torch.cat([torch.zeros_like(case.query), case.query], dim=2)
    check(replace(case, query=fused[..., 32:]))
    by_head = case.query.transpose(0, 1).contiguous()
    check(replace(case, query=by_head.transpose(0, 1)))


def share(case: PagedCase, groups: list[PrefixGroup]) -> PagedCase:
    block_size = case.layer_cache.shape[2]
    shared = SharedPrefixes.from_groups(groups, case.block_tables, case.query_start_loc, block_size, case.query.device)
    return replace(case, batch=replace(case.batch, shared_prefixes=shared))


#: Five forks of a prompt of 3 blocks: one at its border's next token, others further on, one with a chunk to catch up.
FORKED = [(25, 1), (26, 1), (40, 1), (44, 6), (33, 1)]


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"sinks": True}, {"sliding_window": 100}], ids=str)
def test_a_shared_prefix_changes_no_result(options: dict[str, Any]) -> None:
    if "sinks" in options:
        options = {"sinks": torch.tensor([1.0, -2.0, 0.5, 3.0], device=DEVICE)}
    case = paged_case(FORKED, shared_blocks=3, device=DEVICE)
    check(share(case, [PrefixGroup(0, 5, 3)]), **options)
    check(share(case, [PrefixGroup(1, 2, 2), PrefixGroup(3, 2, 3)]), **options)


def test_a_shared_prefix_in_bfloat16_and_in_splits() -> None:
    case = share(paged_case(FORKED, shared_blocks=3, dtype=torch.bfloat16, device=DEVICE), [PrefixGroup(0, 4, 3)])
    split = replace(SMALL, num_splits=2, split_len=16)
    check(case, configs=[split, replace(SMALL, num_splits=3, split_len=16)])


def test_a_window_inside_the_prefix_takes_the_plain_pass() -> None:
    case = share(paged_case(FORKED, shared_blocks=3, device=DEVICE), [PrefixGroup(0, 5, 3)])
    assert len(triton_attention.plan_passes(case.query, case.layer_cache, case.batch, 17)) == 1
    check(case, sliding_window=17)


def test_the_plan_and_the_kernel_agree() -> None:
    """From block tables to results, as a runner does it."""
    case = paged_case(FORKED, shared_blocks=3, device=DEVICE)
    free = PrefixCosts(queries_per_kv=2, plain_tile=16, shared_tile=64, reread=1.0, merge=0.0, launch=0.0)
    context_lens = [seq_len - query_len for seq_len, query_len in FORKED]
    groups = find_prefix_groups(case.block_tables, [query_len for _, query_len in FORKED], context_lens, 8, free)
    assert groups == (PrefixGroup(0, 5, 3),)
    check(share(case, list(groups)))


def test_a_device_that_refuses_a_tile_gets_a_smaller_one(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []
    kernel = triton_attention.attention_kernel

    class Refusing:
        def __getitem__(self, grid: tuple[int, int]) -> Any:
            def launch(*args: Any, **options: Any) -> None:
                launched.append(options["BLOCK_M"])
                if options["BLOCK_M"] > 16:
                    raise OutOfResources(100_000, 65_536, "shared memory")
                kernel[grid](*args, **options)

            return launch

    monkeypatch.setattr(triton_attention, "attention_kernel", Refusing())
    check(paged_case(RAGGED, device=DEVICE), configs=[replace(SMALL, tile=Tile(64, 64, 8, 5))])
    assert launched == [64, 64, 64, 16]


def wrong_arguments() -> list[tuple[str, dict[str, Tensor]]]:
    case = paged_case([(9, 1), (12, 4)])
    wide = torch.zeros(5, 4, 512)
    return [
        ("head size", {"query": wide, "layer_cache": torch.zeros(2, 4, 8, 2, 512)}),
        ("query heads", {"query": case.query[:, :3]}),
        ("query is torch.float16", {"query": case.query.half()}),
        ("contiguous in the head", {"query": torch.zeros(5, 4, 64)[..., ::2]}),
        ("wrong dimensions", {"layer_cache": case.layer_cache[0]}),
        ("sinks", {"sinks": torch.zeros(3)}),
    ]


@pytest.mark.parametrize(
    ("message", "change"), wrong_arguments(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_tensors_that_do_not_fit_are_refused(message: str, change: dict[str, Tensor]) -> None:
    case = paged_case([(9, 1), (12, 4)])
    arguments = {"query": case.query, "layer_cache": case.layer_cache, "batch": case.batch, **change}
    with pytest.raises(ValueError, match=message):
        triton_attention.paged_attention(**arguments, scale=1.0)


def test_metadata_of_the_wrong_type_is_refused() -> None:
    case = paged_case([(9, 1), (12, 4)])
    for change in ({"seq_lens": case.batch.seq_lens.long()}, {"query_start_loc": case.batch.query_start_loc[:2]}):
        with pytest.raises(ValueError, match=r"int32|disagree"):
            triton_attention.paged_attention(case.query, case.layer_cache, replace(case.batch, **change), scale=1.0)

"""Where every layer has a sliding window, blocks that left it are given back, and nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import run_engine
from transformers import MistralConfig, MistralForCausalLM

from pagedbatch.engine.block_manager import BlockManager
from pagedbatch.engine.block_table import NO_BLOCK
from pagedbatch.model.model_defaults import model_defaults
from pagedbatch.params import GenerationParams
from pagedbatch.sequence import Request

WINDOW = 21
PARAMS = [
    GenerationParams(max_tokens=70, ignore_eos=True),
    GenerationParams(n=4, temperature=1.0, max_tokens=70, ignore_eos=True),
    GenerationParams(num_beams=4, n=4, max_tokens=70, ignore_eos=True),
]


@pytest.fixture(scope="module")
def window_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("window_model")
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, initializer_range=0.3, sliding_window=WINDOW,
        eos_token_id=2,
    )  # fmt: skip
    MistralForCausalLM(config).save_pretrained(path)
    return path


def requests() -> list[Request]:
    return [Request(row, [1, *range(20, 30 + 17 * row)], PARAMS[row % 3], rng_key=row) for row in range(6)]


def test_the_window_is_read_from_the_config(window_model_path: Path) -> None:
    assert model_defaults(str(window_model_path)).config.max_window == WINDOW


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 16},
        {"prefix_cache": False},
        {"num_blocks": 44, "num_swap_blocks": 200, "preemption": "swap"},
        {"num_blocks": 44, "preemption": "recompute"},
    ],
    ids=str,
)
def test_giving_blocks_back_changes_no_output(window_model_path: Path, settings: dict[str, Any]) -> None:
    kept = run_engine(window_model_path, requests(), block_size=8)
    dropped = run_engine(window_model_path, requests(), block_size=8, window=WINDOW, **settings)
    assert dropped.token_ids() == kept.token_ids()
    if "preemption" in settings:
        assert dropped.counters.preemptions_swap + dropped.counters.preemptions_recompute > 0
    assert max(s.pool.live for s in dropped.snapshots) < max(s.pool.live for s in kept.snapshots)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_samples_that_wait_come_to_a_prompt_whose_blocks_are_gone(window_model_path: Path, prefix_cache: bool) -> None:
    request = Request(0, [1, *range(20, 70)], GenerationParams(n=9, temperature=1.0, max_tokens=40), rng_key=5)
    wide = run_engine(window_model_path, [request], block_size=8)
    narrow = run_engine(
        window_model_path, [request], block_size=8, window=WINDOW, max_num_seqs=2, prefix_cache=prefix_cache
    )
    assert narrow.token_ids() == wide.token_ids()


def test_a_long_output_fits_a_pool_of_little_more_than_the_window(window_model_path: Path) -> None:
    request = Request(0, [1, 5, 6], GenerationParams(max_tokens=300, ignore_eos=True))
    settings: dict[str, Any] = {"num_blocks": 8, "block_size": 8, "max_num_batched_tokens": 8}
    run = run_engine(window_model_path, [request], window=WINDOW, **settings)
    assert max(s.pool.live for s in run.snapshots) <= WINDOW // 8 + 2
    assert len(run.outputs[0].outputs[0].token_ids) == 300
    assert "needs 38 KV blocks" in (run_engine(window_model_path, [request], **settings).outputs[0].error or "")


def test_each_owner_gives_a_block_up_once() -> None:
    blocks = BlockManager(num_blocks=8, block_size=4)
    blocks.create_table(1, blocks.root_of(0), [])
    blocks.extend(1, 0, 10)
    blocks.fork(1, 2)
    shared = blocks.block_table(1)[0]
    for _ in range(2):
        blocks.drop_before(1, 7)
        blocks.check_integrity()
    assert blocks.block_table(1)[0] == NO_BLOCK
    assert blocks.block_table(2)[0] == shared
    assert blocks.pool.ref_count[shared] == 1
    blocks.drop_before(2, 4)
    assert blocks.pool.ref_count[shared] == 0
    for seq_id in (1, 2):
        blocks.free(seq_id)
    blocks.check_integrity()
    assert blocks.counts().live == 0

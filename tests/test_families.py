"""Every supported family: our logits against Hugging Face's eager attention on the same random weights, in float32.

One run covers prefill in chunks, decoding and forked sequences with copy-on-write; tiny windows, soft caps and sinks
matter within the prompt. The README's table of families is `FAMILIES`.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from engines import RecordingRunner
from families import COMMON, FAMILIES, GQA_KEYS, MHA_ONLY
from transformers import AutoConfig, AutoModelForCausalLM

from pagedbatch.config import EngineConfig
from pagedbatch.engine.engine import Engine
from pagedbatch.model.attention import ATTENTION_NAME, register_attention
from pagedbatch.model.forward import ForwardName
from pagedbatch.model.llama_forward import FUSED_MODEL_TYPES
from pagedbatch.model.loader import LoadedModel
from pagedbatch.model.model_config import SUPPORTED_MODEL_TYPES, ModelConfig, check_supported
from pagedbatch.model.model_defaults import ModelDefaults
from pagedbatch.params import GenerationParams
from pagedbatch.sequence import Request

PROMPT = [1, *range(3, 43)]
TOLERANCE = 1e-4


def eager_and_paged(family: str) -> tuple[Any, LoadedModel]:
    """The same random model twice: Hugging Face's eager attention, and ours."""
    common = {name: value for name, value in COMMON.items() if not (family in MHA_ONLY and name in GQA_KEYS)}
    config = AutoConfig.for_model(family, **{**common, **FAMILIES[family]})
    check_supported(config)
    torch.manual_seed(0)
    register_attention()
    eager, ours = (
        AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=name, dtype=torch.float32).eval()
        for name in ("eager", ATTENTION_NAME)
    )
    ours.load_state_dict(eager.state_dict())
    defaults = ModelDefaults(ModelConfig.from_hf(ours.config), frozenset({2}), 128)
    return eager, LoadedModel(ours, torch.float32, torch.device("cpu"), defaults)


@pytest.mark.parametrize(
    ("family", "forward"),
    [*((name, "hf") for name in sorted(FAMILIES)), *((name, "fused") for name in sorted(FUSED_MODEL_TYPES))],
)
def test_logits_equal_eager(family: str, forward: str) -> None:
    eager, loaded = eager_and_paged(family)
    asked: ForwardName = "hf" if forward == "hf" else "auto"
    runner = RecordingRunner.create(loaded, forward=asked, block_size=8, num_blocks=64)
    assert isinstance(runner, RecordingRunner)
    if forward == "fused" and runner.backend_name != "cpu":
        pytest.skip("the fused forward needs the CPU's library, and it can't be built here")
    assert runner.forward_name == forward
    config = EngineConfig(num_blocks=64, block_size=8, max_num_batched_tokens=17, check_invariants=True)
    engine = Engine(config, runner)
    engine.add(Request(0, PROMPT, GenerationParams(n=3, temperature=1.0, max_tokens=12, ignore_eos=True), rng_key=5))
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step().finished
    samples = [output.token_ids for output in outputs[0].outputs]
    assert len({tuple(ids) for ids in samples}) == 3

    for index, token_ids in enumerate(samples):
        with torch.inference_mode():
            expected = eager(torch.tensor([PROMPT + token_ids])).logits[0]
        for position in range(len(token_ids)):
            length = len(PROMPT) + position
            found = runner.seen[length, (0, 1, 2) if position == 0 else (index,)]
            torch.testing.assert_close(found, expected[length - 1], atol=TOLERANCE, rtol=TOLERANCE)


def test_every_supported_family_is_tested() -> None:
    assert set(FAMILIES) == SUPPORTED_MODEL_TYPES

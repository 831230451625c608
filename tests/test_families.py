"""Every supported family: our logits against Hugging Face's eager attention on the same random weights, in float32.

One run covers prefill in chunks, decoding and forked sequences with copy-on-write; tiny windows, soft caps and sinks
matter within the prompt. The README's table of families is `FAMILIES`.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from pagedbatch.config import EngineConfig
from pagedbatch.engine.engine import Engine
from pagedbatch.model.attention import ATTENTION_NAME, register_attention
from pagedbatch.model.forward import ForwardName
from pagedbatch.model.input_batch import InputBatch
from pagedbatch.model.llama_forward import LEAN_MODEL_TYPES
from pagedbatch.model.loader import LoadedModel, ModelDefaults
from pagedbatch.model.runner import ModelRunner
from pagedbatch.model.support import SUPPORTED_MODEL_TYPES, check_supported
from pagedbatch.params import GenerationParams
from pagedbatch.sequence import Request
from pagedbatch.step import ModelRunnerOutput, SchedulerOutput

COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
#: Families without grouped queries; their configs don't know these names.
MHA_ONLY = {"gpt2", "gpt_bigcode", "gpt_neox", "gptj", "opt", "persimmon"}
GQA_KEYS = {"num_key_value_heads", "head_dim"}
MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 11}

#: model type -> what its tiny config sets beside `COMMON`.
FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": {**ALTERNATING, **MOE},
    "apertus": {},
    "arcee": {},
    "bitnet": {},
    "cohere": {"logit_scale": 0.5},
    "cohere2": ALTERNATING,
    "cwm": {},
    "ernie4_5": {},
    "ernie4_5_moe": MOE,
    "exaone4": ALTERNATING,
    "flex_olmo": MOE,
    "gemma": {},
    "gemma2": {
        **ALTERNATING,
        "initializer_range": 0.1,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 30.0,
        "query_pre_attn_scalar": 9,
    },
    "gemma3_text": {**ALTERNATING, "initializer_range": 0.1, "query_pre_attn_scalar": 9},
    "glm": {},
    "glm4": {},
    "glm4_moe": MOE,
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "gpt_bigcode": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "gpt_neox": {},
    "gpt_oss": {**ALTERNATING, **MOE},
    "gptj": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "rotary_dim": 8},
    "granite": {"attention_multiplier": 0.3},
    "helium": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": MOE,
    "jais2": {},
    "llama": {},
    "minimax_m2": MOE,
    "ministral": ALTERNATING,
    "mistral": {"sliding_window": 11},
    "mixtral": MOE,
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": ALTERNATING,
    "olmoe": MOE,
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "persimmon": {},
    "phi": {},
    "phi3": {"sliding_window": 11},
    "phimoe": MOE,
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 11},
    "qwen2_moe": MOE,
    "qwen3": {},
    "qwen3_moe": MOE,
    "seed_oss": {},
    "smollm3": {"no_rope_layers": [1, 0]},
    "stablelm": {},
    "starcoder2": {"sliding_window": 11},
    "vaultgemma": {**ALTERNATING, "initializer_range": 0.1},
}

PROMPT = [1, *range(3, 43)]
TOLERANCE = 1e-4


class RecordingRunner(ModelRunner):
    """Keeps the logits of every draw, by the position that they follow and the last token there."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: dict[tuple[int, tuple[int, ...]], Tensor] = {}
        self._forward_of_step, self._forward = self._forward, self._recorded

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self._step = step
        return super().execute(step)

    def _recorded(self, batch: InputBatch) -> Tensor:
        logits = self._forward_of_step(batch)
        for task, row in zip(self._step.samples, logits, strict=True):
            scheduled = self._step.sequences[task.seq_index]
            length = scheduled.context_len + len(scheduled.token_ids)
            self.seen.setdefault((length, task.sample_indices), row.clone())
        return logits


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
    defaults = ModelDefaults({}, frozenset({2}), 128, config.vocab_size)
    return eager, LoadedModel(ours, ours.config, torch.float32, torch.device("cpu"), defaults)


@pytest.mark.parametrize(
    ("family", "forward"),
    [*((name, "plain") for name in sorted(FAMILIES)), *((name, "lean") for name in sorted(LEAN_MODEL_TYPES))],
)
def test_logits_equal_eager(family: str, forward: str) -> None:
    eager, loaded = eager_and_paged(family)
    asked: ForwardName = "plain" if forward == "plain" else "auto"
    runner = RecordingRunner.create(loaded, forward=asked, block_size=8, num_blocks=64)
    assert isinstance(runner, RecordingRunner)
    if forward == "lean" and runner.backend_name != "cpu":
        pytest.skip("the lean forward needs the CPU's library, and it can't be built here")
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

"""The fused forward: what it takes over, when it runs, and that it says what the library's says.

Its logits are compared with Hugging Face's, family by family, in test_families.py; whole runs in test_cpu_attention.py.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from pagedbatch_kernels.cpu.build import can_load
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from pagedbatch.model.attention import ATTENTION_NAME, register_attention
from pagedbatch.model.forward import ForwardName
from pagedbatch.model.llama_forward import can_run_fused
from pagedbatch.model.loader import LoadedModel, load_model
from pagedbatch.model.model_config import ModelConfig
from pagedbatch.model.model_defaults import ModelDefaults
from pagedbatch.model.runner import ModelRunner
from pagedbatch.params import GenerationParams
from pagedbatch.step import PromptTask, SampleTask, ScheduledSequence, SchedulerOutput

pytestmark = pytest.mark.skipif(not can_load(), reason="there is no C++ compiler here")


def llama(dtype: torch.dtype = torch.float32, **changes: Any) -> LoadedModel:
    settings: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
        **changes,
    }
    register_attention()
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(LlamaConfig(**settings), attn_implementation=ATTENTION_NAME, dtype=dtype)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # zero at first
            nn.init.normal_(parameter)
    model.eval().requires_grad_(False)
    defaults = ModelDefaults(ModelConfig.from_hf(model.config), frozenset({2}), 128)
    return LoadedModel(model, dtype, torch.device("cpu"), defaults)


def runner_of(loaded: LoadedModel, forward: ForwardName = "auto", *, keep_model: bool = True) -> ModelRunner:
    return ModelRunner.create(
        loaded, attention="cpu", forward=forward, keep_model=keep_model, block_size=8, num_blocks=32
    )


def step_of(*rows: tuple[list[int], int, list[int]], draws: list[int], prompts: list[PromptTask] | None = None) -> Any:
    """Rows as (token ids, context length, block table), of which `draws` draw."""
    sequences = [ScheduledSequence(i, ids, context_len, table) for i, (ids, context_len, table) in enumerate(rows)]
    params = GenerationParams(temperature=0.0, logprobs=5)
    samples = [SampleTask(row, params, 0, (0,), 0) for row in draws]
    num_tokens = sum(len(ids) for ids, *_ in rows)
    return SchedulerOutput(0, sequences, samples, [], [], [], [], num_tokens, prompts or [])


def logits_of(runner: ModelRunner, step: SchedulerOutput) -> Tensor:
    seen: list[Tensor] = []
    forward = runner._forward

    def recorded(batch: Any) -> Tensor:
        seen.append(forward(batch))
        return seen[-1]

    runner._forward = recorded
    runner.execute(step)
    runner._forward = forward
    return seen[0]


MIXED = (([5, 6, 7, 8, 9, 10, 11, 12, 13], 0, [0, 1]), ([20, 21, 22], 0, [2]), ([30, 31, 32, 33], 0, [3]))


def test_plain_is_an_old_name_of_hf() -> None:
    assert runner_of(llama(), "plain").forward_name == "hf"


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "mlp_bias": True}, {"tie_word_embeddings": True}])
@pytest.mark.parametrize("draws", [[2, 0], [1], [0, 1, 2], []])
def test_logits_are_those_of_the_hf_forward(changes: dict[str, Any], draws: list[int]) -> None:
    loaded = llama(**changes)
    hf, fused = runner_of(loaded, "hf"), runner_of(loaded)
    assert (hf.forward_name, fused.forward_name) == ("hf", "fused")
    for step in (step_of(*MIXED, draws=draws), step_of(([14], 9, [0, 1]), ([23], 3, [2]), draws=[1, 0])):
        torch.testing.assert_close(logits_of(fused, step), logits_of(hf, step), atol=1e-4, rtol=1e-4)


def test_scored_prompts_are_those_of_the_hf_forward() -> None:
    loaded = llama()
    prompts = [PromptTask(seq_index=0, first=2, targets=[8, 9, 10], num_top=2), PromptTask(1, 0, [21], 0)]
    step = step_of(*MIXED, draws=[2], prompts=prompts)
    found, wanted = runner_of(loaded).execute(step), runner_of(loaded, "hf").execute(step)
    for one, other in zip(found.prompts, wanted.prompts, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    assert [len(one.logprobs) for one in found.prompts] == [3, 1]
    assert found.samples[0].token_ids == wanted.samples[0].token_ids


def test_bfloat16_stays_near_float32() -> None:
    exact, step = (
        logits_of(runner_of(llama(), "hf"), step_of(*MIXED, draws=[0, 1, 2])),
        step_of(*MIXED, draws=[0, 1, 2]),
    )
    loaded = llama(torch.bfloat16)
    fused_error, hf_error = (
        (logits_of(runner_of(loaded, forward), step).float() - exact).abs().max() for forward in ("auto", "hf")
    )
    assert 0 < fused_error < 2 * hf_error


def test_the_last_layer_computes_only_what_is_drawn_from() -> None:
    runner = runner_of(llama())
    rows: list[int] = []
    attend = runner._attention.backend.paged_attention
    runner._attention.backend.paged_attention = lambda query, *args, **options: (  # type: ignore[method-assign]
        rows.append(len(query)) or attend(query, *args, **options)
    )
    runner.execute(step_of(*MIXED, draws=[2, 0]))
    assert rows == [16, 16, 2]
    rows.clear()
    runner.execute(step_of(*MIXED, draws=[]))
    assert rows == [16, 16]


def test_weights_are_taken_over_unless_they_are_to_be_kept() -> None:
    loaded, other = llama(), llama()
    step = step_of(*MIXED, draws=[0])
    kept = logits_of(runner_of(loaded), step)
    assert all(module.weight.numel() for module in loaded.model.modules() if isinstance(module, nn.Linear))
    assert torch.equal(logits_of(runner_of(other, keep_model=False), step), kept)
    assert not any(
        module.weight.numel() for module in other.model.model.layers.modules() if isinstance(module, nn.Linear)
    )
    assert not other.model.lm_head.weight.numel()
    assert other.model.model.embed_tokens.weight.numel()


@pytest.mark.parametrize("tied", [False, True])
def test_the_checkpoint_leaves_the_memory_when_its_weights_are_taken_over(tmp_path: Path, tied: bool) -> None:
    llama(tie_word_embeddings=tied, attention_bias=True).model.save_pretrained(tmp_path)
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("what is mapped into memory can be read on Linux only")
    loaded = load_model(str(tmp_path), dtype="float32", device="cpu")
    assert str(tmp_path) in maps.read_text()
    runner = runner_of(loaded, keep_model=False)
    gc.collect()
    assert str(tmp_path) not in maps.read_text()
    assert runner.forward_name == "fused"


def test_a_head_that_is_the_embeddings_too_stays() -> None:
    loaded = llama(tie_word_embeddings=True)
    assert torch.isfinite(logits_of(runner_of(loaded, keep_model=False), step_of(*MIXED, draws=[0]))).all()
    assert loaded.model.lm_head.weight.numel()


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": "gelu"},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ],
)
def test_a_model_that_differs_from_its_family_keeps_the_hf_forward(changes: dict[str, Any]) -> None:
    assert can_run_fused(llama().model)
    loaded = llama(**changes)
    if changes.get("rope_parameters"):  # Llama itself knows no such factor; what it would leave behind is a short table
        loaded.model.model.rotary_emb.inv_freq = loaded.model.model.rotary_emb.inv_freq[:4]
    assert not can_run_fused(loaded.model)


def test_other_families_layers_and_dtypes_keep_the_hf_forward() -> None:
    half = llama(torch.float16).model
    assert not can_run_fused(half)
    quantized = llama().model
    quantized.model.layers[1].mlp.down_proj = nn.Sequential(quantized.model.layers[1].mlp.down_proj)
    assert not can_run_fused(quantized)
    other = llama().model
    other.config.model_type = "granite"
    assert not can_run_fused(other)

"""The end-to-end part of gpu-check: the whole engine on a GPU, with random weights in Qwen3-0.6B's shape.

- nano-vllm's workload: 256 sequences of 100-1024 random tokens in and 100-1024 out, end tokens ignored;
- beam search of width 4, 8 and 20: 8 prompts of 256 tokens, 32 new tokens.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pagedbatch.config import EngineConfig
from pagedbatch.engine.engine import Engine
from pagedbatch.model.attention import ATTENTION_NAME, register_attention
from pagedbatch.model.loader import LoadedModel
from pagedbatch.model.model_config import ModelConfig
from pagedbatch.model.model_defaults import ModelDefaults
from pagedbatch.model.runner import ModelRunner
from pagedbatch.params import GenerationParams
from pagedbatch.sequence import Request

#: Seconds that vLLM 0.32 takes for the beam workloads on an A100, by width; the goal is a fifth of that.
VLLM_BEAM_SECONDS = {4: 2.13, 8: 2.71, 20: 6.61}
BEAM_GOAL = 5.0

QWEN3_0_6B = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
TOY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True, slots=True)
class Workload:
    """Named requests. `vllm_seconds`: the time to compare with, if there is one."""

    name: str
    requests: list[Request]
    vllm_seconds: float | None = None

    @property
    def num_output_tokens(self) -> int:
        return sum(r.params.max_tokens * r.params.width for r in self.requests)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The figures of a workload. `goal` is "met", "missed" or empty."""

    name: str
    figures: dict[str, float]
    goal: str = ""


def run_workloads(*, dry: bool) -> Iterator[Outcome]:
    """Each workload once, after a small one that compiles the kernels."""
    device = torch.device("cpu" if dry else "cuda")
    loaded = random_model(TOY if dry else QWEN3_0_6B, device, torch.float32 if dry else torch.bfloat16)
    workloads = toy_workloads() if dry else full_workloads()
    for workload in workloads:
        run_engine(loaded, warm_up(workload), dry=dry)
        yield measure(loaded, workload, dry=dry)


def random_model(shape: dict[str, int], device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """A Qwen3 with random weights."""
    config = AutoConfig.for_model("qwen3", **shape)
    register_attention()
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME, dtype=dtype)
    model.eval().requires_grad_(False)
    defaults = ModelDefaults(ModelConfig.from_hf(config), frozenset(), config.max_position_embeddings)
    return LoadedModel(model, dtype, device, defaults)


def full_workloads() -> list[Workload]:
    rng = random.Random(0)
    nano = [
        Request(i, random_prompt(rng, rng.randint(100, 1024), 10_000), sampled(rng.randint(100, 1024)), rng_key=i)
        for i in range(256)
    ]
    return [Workload("nano-vllm's 256 requests", nano), *(beams(rng, 8, 256, 32, width) for width in VLLM_BEAM_SECONDS)]


def toy_workloads() -> list[Workload]:
    rng = random.Random(0)
    requests = [Request(i, random_prompt(rng, rng.randint(3, 20), 500), sampled(3), rng_key=i) for i in range(3)]
    return [Workload("3 requests", requests), beams(rng, 1, 9, 3, 4)]


def sampled(max_tokens: int) -> GenerationParams:
    return GenerationParams(temperature=0.6, max_tokens=max_tokens, ignore_eos=True)


def beams(rng: random.Random, num_prompts: int, prompt_len: int, max_tokens: int, width: int) -> Workload:
    params = GenerationParams(num_beams=width, n=width, max_tokens=max_tokens, ignore_eos=True)
    requests = [Request(i, random_prompt(rng, prompt_len, 500), params) for i in range(num_prompts)]
    return Workload(f"beams {width}", requests, VLLM_BEAM_SECONDS.get(width) if num_prompts == 8 else None)


def random_prompt(rng: random.Random, length: int, largest: int) -> list[int]:
    return [rng.randint(0, largest) for _ in range(length)]


def warm_up(workload: Workload) -> list[Request]:
    """A few requests of the same kind with other prompts than those that are measured."""
    few = workload.requests[:8]
    return [Request(r.request_id, r.prompt_token_ids[::-1], r.params, r.rng_key) for r in few]


def measure(loaded: LoadedModel, workload: Workload, *, dry: bool) -> Outcome:
    seconds = run_engine(loaded, workload.requests, dry=dry)
    figures = {"s": seconds, "tokens/s": workload.num_output_tokens / seconds}
    if workload.vllm_seconds is None:
        return Outcome(workload.name, figures)
    figures["times vllm"] = workload.vllm_seconds / seconds
    return Outcome(workload.name, figures, "met" if figures["times vllm"] >= BEAM_GOAL else "missed")


def run_engine(loaded: LoadedModel, requests: list[Request], *, dry: bool) -> float:
    """Seconds from the first step to the last."""
    settings = {"max_num_seqs": 256, "max_num_batched_tokens": 16 if dry else 16_384}
    runner = ModelRunner.create(
        loaded,
        attention="triton",
        num_blocks=64 if dry else None,
        max_num_seqs=settings["max_num_seqs"],
    )
    engine = Engine(EngineConfig(num_blocks=runner.num_blocks, block_size=16, **settings), runner)
    for request in requests:
        engine.add(request)
    began = time.perf_counter()
    while engine.has_unfinished:
        engine.step()
    return time.perf_counter() - began

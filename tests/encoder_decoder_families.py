"""Tiny random encoder-decoders of every supported family, and runs of them here and by Hugging Face's `generate`."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from pagedbatch.config import EngineConfig
from pagedbatch.engine.engine import Engine
from pagedbatch.model.attention import ATTENTION_NAME, register_attention
from pagedbatch.model.generation_defaults import read_generation_defaults
from pagedbatch.model.loader import LoadedModel
from pagedbatch.model.model_config import ModelConfig, check_supported
from pagedbatch.model.model_defaults import ModelDefaults
from pagedbatch.model.runner import ModelRunner
from pagedbatch.outputs import RequestOutput
from pagedbatch.params import resolve
from pagedbatch.sequence import Request

PAD, EOS, START, VOCABULARY = 0, 1, 2, 96
MAX_POSITIONS = 96

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "dropout": 0.0,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "bos_token_id": START,
    "decoder_start_token_id": START,
    "forced_eos_token_id": None,
    "forced_bos_token_id": None,
}
_BART: dict[str, Any] = {
    **_COMMON,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": MAX_POSITIONS,
    "init_std": 0.3,
}
_T5: dict[str, Any] = {
    **_COMMON,
    "num_layers": 3,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "d_kv": 12,
    "d_ff": 48,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "tie_word_embeddings": False,
}

#: model type -> what its tiny config says.
FAMILIES: dict[str, dict[str, Any]] = {
    "bart": {**_BART, "activation_function": "gelu"},
    "blenderbot": {**_BART, "activation_function": "gelu"},
    "m2m_100": {**_BART, "scale_embedding": True, "activation_function": "relu"},
    "marian": {**_BART, "scale_embedding": True, "activation_function": "swish", "static_position_embeddings": True},
    "mbart": {**_BART, "scale_embedding": True, "activation_function": "gelu"},
    "mt5": {**_T5, "feed_forward_proj": "gated-gelu"},
    "pegasus": {**_BART, "scale_embedding": True, "activation_function": "relu"},
    "plbart": {**_BART, "scale_embedding": True, "activation_function": "gelu"},
    "t5": {**_T5, "feed_forward_proj": "relu"},
    "umt5": {**_T5, "feed_forward_proj": "gated-gelu"},
}

SOURCES = [
    [31, 10, 19, 13, 5, 7, EOS],
    [44, 45, EOS],
    [*range(5, 45), EOS],
    [EOS],
    [77, 12, 90, 33, 8, 21, 64, 18, 52, 71, 9, 27, 35, 83, 14, 66, EOS],
]


@dataclass(frozen=True)
class Pair:
    """The same random model twice: for `generate`, and for a runner."""

    hf: Any
    loaded: LoadedModel


@cache
def pair(family: str) -> Pair:
    config = AutoConfig.for_model(family, **FAMILIES[family])
    check_supported(config)
    torch.manual_seed(7)
    register_attention()
    eager, ours = (
        AutoModelForSeq2SeqLM.from_config(copy.deepcopy(config), attn_implementation=name, dtype=torch.float32).eval()
        for name in ("eager", ATTENTION_NAME)
    )
    with torch.no_grad():
        if hasattr(eager, "final_logits_bias"):
            eager.final_logits_bias.normal_(0, 0.5)
        for name, weight in eager.named_parameters():
            if name.endswith("bias"):
                weight.normal_(0, 0.1)
            elif "d_kv" in FAMILIES[family] and weight.dim() == 2:  # T5's own initial outputs repeat one token
                weight.normal_(0, 1.0 if "relative" in name else 0.25)
    ours.load_state_dict(eager.state_dict())
    described = ModelConfig.from_hf(ours.config)
    defaults = ModelDefaults(described, frozenset({EOS}), MAX_POSITIONS, decoder_start_token_id=START)
    return Pair(eager, LoadedModel(ours, torch.float32, torch.device("cpu"), defaults))


def run(
    family: str,
    requests: list[Request],
    *,
    num_blocks: int = 400,
    block_size: int = 16,
    num_swap_blocks: int = 0,
    attention: str = "auto",
    forward: Any = "auto",
    **settings: Any,
) -> tuple[dict[int, RequestOutput], Engine]:
    """Runs to the end with every invariant checked after each step, and all blocks back at the end."""
    loaded = pair(family).loaded
    create = {"attention": attention, "forward": forward, "num_blocks": num_blocks, "block_size": block_size}
    runner = ModelRunner.create(loaded, **create)
    if runner.backend_name == "cpu":
        assert runner.forward_name == ("hf" if forward == "hf" else "fused")
    if num_swap_blocks:
        runner = ModelRunner.create(loaded, **create, swap_space=num_swap_blocks * runner.block_bytes)
    config = EngineConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        num_swap_blocks=runner.num_swap_blocks,
        eos_token_ids=loaded.defaults.eos_token_ids,
        max_model_len=MAX_POSITIONS,
        check_invariants=True,
        **settings,
    )
    engine = Engine(config, runner)
    for request in requests:
        engine.add(request)
    outputs: dict[int, RequestOutput] = {}
    while engine.has_unfinished:
        outputs |= {output.request_id: output for output in engine.step().finished}
    counts = engine.pool_counts()
    assert (counts.live, counts.logical, counts.filled_slots) == (0, 0, 0)
    return outputs, engine


def request(number: int, source: list[int], generation: dict[str, Any], **asked: Any) -> Request:
    """A request as the job makes it of a generation_config and what is asked for."""
    from types import SimpleNamespace

    values = read_generation_defaults(SimpleNamespace(**generation), MAX_POSITIONS, is_encoder_decoder=True).values
    return Request(number, [START], resolve(values, asked), rng_key=number, source_token_ids=source)


def generate(family: str, source: list[int], **settings: Any) -> list[tuple[list[int], float | None]]:
    """(generated ids, score) of each sequence that `generate` returns, cut after the first end token."""
    ids = torch.tensor([source])
    with torch.inference_mode():
        out = pair(family).hf.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
            use_cache=not family.endswith("t5"),
            **settings,
        )
    scores = out.sequences_scores.tolist() if settings.get("num_beams", 1) > 1 else [None] * len(out.sequences)
    return [(_cut(sequence.tolist()[1:]), score) for sequence, score in zip(out.sequences, scores, strict=True)]


def _cut(token_ids: list[int]) -> list[int]:
    return token_ids[: token_ids.index(EOS) + 1] if EOS in token_ids else token_ids

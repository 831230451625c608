"""Every supported family in bfloat16 on a CPU, with sizes that fill no tile: no GEMM of its forward is left cut,
down to what torch itself calls, and logits are those without padding."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from families import COMMON, FAMILIES, GQA_KEYS, MHA_ONLY
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from pagedbatch.model import forward
from pagedbatch.model.attention import ATTENTION_NAME, register_attention
from pagedbatch.model.loader import LoadedModel
from pagedbatch.model.model_config import ModelConfig
from pagedbatch.model.model_defaults import ModelDefaults
from pagedbatch.model.runner import ModelRunner
from pagedbatch.params import GenerationParams
from pagedbatch.step import SampleTask, ScheduledSequence, SchedulerOutput

#: torch's grouped GEMMs, of experts, take multiples of 8 alone.
ODD = {
    "hidden_size": 72,
    "intermediate_size": 104,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 40,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "n_embd": 72,
    "n_head": 3,
    "ffn_dim": 100,
    "word_embed_proj_dim": 72,
}
#: Names of torch's GEMMs -> the index of the first factor.
GEMMS = {"linear": 0, "mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "mv": 0, "addmv": 1, "_grouped_mm": 0}


class CutGemms(TorchDispatchMode):
    """Names of the bfloat16 GEMMs whose inner dimension fills no whole tiles, seen right before they are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.num_gemms = 0

    def __torch_dispatch__(
        self,
        function: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = function.overloadpacket.__name__
        if name in GEMMS and (rows := args[GEMMS[name]]).dtype == torch.bfloat16:
            self.num_gemms += 1
            if rows.shape[-1] % 32:
                self.names.append(f"{name} {list(rows.shape)}")
        return function(*args, **(kwargs or {}))


def odd_model(family: str) -> LoadedModel:
    known = {name: value for name, value in COMMON.items() if not (family in MHA_ONLY and name in GQA_KEYS)}
    settings = {**known, **FAMILIES[family]}
    settings |= {name: value for name, value in ODD.items() if name in settings}
    config = AutoConfig.for_model(family, **settings)
    register_attention()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME, dtype=torch.bfloat16).eval()
    defaults = ModelDefaults(ModelConfig.from_hf(config), frozenset({2}), 128)
    return LoadedModel(model.requires_grad_(False), torch.bfloat16, torch.device("cpu"), defaults)


def logprobs(loaded: LoadedModel, mode: Callable[[], Any] = contextlib.nullcontext) -> list[float]:
    runner = ModelRunner.create(loaded, forward="hf", block_size=8, num_blocks=8)
    params = GenerationParams(logprobs=20)
    sequences = [ScheduledSequence(i, list(range(3 + i, 9 + 2 * i)), 0, [2 * i, 2 * i + 1]) for i in range(3)]
    samples = [SampleTask(row, params, 0, (0,), 0) for row in range(3)]
    with mode():
        output = runner.execute(SchedulerOutput(0, sequences, samples, [], [], [], [], 21))
    tops = [dict(sample.top_logprobs[0]) for sample in output.samples if sample.top_logprobs]
    return [top[token] for top in tops for token in sorted(top)[:5]]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_no_gemm_is_left_cut(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, cut = odd_model(family), CutGemms()
    found = logprobs(loaded, lambda: cut)
    assert cut.num_gemms > 0
    assert cut.names == []
    monkeypatch.setattr(forward, "needs_padding", lambda model: False)
    assert logprobs(loaded) == pytest.approx(found, abs=0.2)
    unpadded = CutGemms()
    logprobs(loaded, lambda: unpadded)
    assert unpadded.names

"""From a step's batch to logits: by the forward of transformers, or by a fused one (llama_forward.py)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from torch import Tensor

from pagedbatch.errors import RunError
from pagedbatch.model.attention import PagedAttention
from pagedbatch.model.input_batch import InputBatch
from pagedbatch.model.mapped_weights import map_separately
from pagedbatch.model.padded_gemm import PaddedGemm, needs_padding

#: Logits [num_logits, vocab_size] of the batch's `logits_indices`.
Forward: TypeAlias = Callable[[InputBatch], Tensor]

ForwardName: TypeAlias = Literal["auto", "hf", "plain"]  # "plain" is an old name of "hf"


class HfForward:
    """The forward of transformers, whose attention layers call ours."""

    def __init__(self, model: Any, attention: PagedAttention, num_layers: int) -> None:
        self._model = model
        self._attention = attention
        self._num_layers = num_layers
        self._gemm_mode = PaddedGemm() if needs_padding(model) else contextlib.nullcontext()
        attention.bind(model)

    def __call__(self, batch: InputBatch) -> Tensor:
        """
        Raises:
            RunError: a layer computed its attention without the KV pool.
        """
        with self._gemm_mode:
            output = self._model(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                use_cache=False,
                logits_to_keep=batch.logits_indices,
            )
        if self._attention.calls != self._num_layers:
            raise RunError(
                f"{self._attention.calls} of {self._num_layers} layers attended through the KV pool: "
                f"model type {self._model.config.model_type!r} does not route its attention through it"
            )
        logits: Tensor = output.logits[0]
        return logits


def choose_forward(
    name: ForwardName,
    model: Any,
    attention: PagedAttention,
    *,
    backend_name: str,
    num_layers: int,
    keep_model: bool,
) -> tuple[str, Forward]:
    """The fused forward if `name` is "auto" and the model has one, else that of transformers; and its name.

    Args:
        backend_name: the attention backend's; the fused forward needs the C++ library, "cpu".
        keep_model: leave `model` its weights, whichever forward it is.
    """
    if name == "auto" and backend_name == "cpu":
        from pagedbatch_kernels.cpu.norm_rope import NormRope

        from pagedbatch.model.llama_forward import FusedForward, can_run_fused
        from pagedbatch.model.packed_linear import choose_linears

        if can_run_fused(model):
            if not keep_model:
                _detach_from_mmap(model)
            linears = choose_linears(model.dtype)
            return "fused", FusedForward(model, attention, NormRope(), linears, keep_model=keep_model)
    return "hf", HfForward(model, attention, num_layers)


def _detach_from_mmap(model: Any) -> None:
    """Copies embeddings, norms and biases, which the fused forward uses as they are, out of the mapped checkpoint.

    The checkpoint is mapped into memory as a whole, and one tensor in it would keep all of it resident beside the
    packed weights. Weights that will be packed get a mapping each, which goes when they are released.
    """
    embeddings = model.get_input_embeddings().weight
    packed = []
    for parameter in model.parameters():
        if parameter.dim() == 1 or parameter is embeddings:
            parameter.data = parameter.data.clone()
        else:
            packed.append(parameter)
    map_separately(packed)

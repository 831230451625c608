"""From a step's batch to logits: by the forward of transformers, or by a fused one.

llama_forward.py and fused_encoder_decoder.py are fused, encoder_decoder.py is that of transformers too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from torch import Tensor

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
        self._attention.check_calls(self._num_layers, self._model.config.model_type)
        logits: Tensor = output.logits[0]
        return logits


def choose_forward(
    name: ForwardName,
    model: Any,
    attention: PagedAttention,
    *,
    backend_name: str,
    num_layers: int,
    block_size: int,
    max_positions: int,
    keep_model: bool,
) -> tuple[str, Forward]:
    """The fused forward if `name` is "auto" and the model has one, else that of transformers; and its name.

    Args:
        backend_name: the attention backend's; the fused forward needs the C++ library, "cpu".
        block_size, max_positions: of the cache, and maximum length of a sequence, in tokens.
        keep_model: leave `model` its weights, whichever forward it is.
    """
    from pagedbatch.model import fused_encoder_decoder, llama_forward
    from pagedbatch.model.encoder_decoder import EncoderDecoderForward

    is_encoder_decoder = getattr(model.config, "is_encoder_decoder", False)
    family = fused_encoder_decoder if is_encoder_decoder else llama_forward
    sizes = {"block_size": block_size, "max_positions": max_positions}
    if name == "auto" and backend_name == "cpu" and family.can_run_fused(model):
        from pagedbatch_kernels.cpu.norm_rope import NormRope

        from pagedbatch.model.packed_linear import choose_linears

        if not keep_model:
            _detach_from_mmap(model)
        ops, linears = NormRope(), choose_linears(model.dtype)
        if is_encoder_decoder:
            fused = fused_encoder_decoder.FusedEncoderDecoder
            return "fused", fused(model, attention, ops, linears, **sizes, keep_model=keep_model)
        return "fused", llama_forward.FusedForward(model, attention, ops, linears, keep_model=keep_model)
    if is_encoder_decoder:
        return "hf", EncoderDecoderForward(model, attention, **sizes)
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

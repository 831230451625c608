"""The forward of transformers for encoder-decoders, on the paged pool.

Each attention layer is bound to one of three: the decoder's self-attention attends as in any decoder; its
cross-attention writes K and V of the sources encoded in this step into their blocks, then reads the sources of all
tokens; the encoder's attends over a scratch cache of one layer, in both directions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pagedbatch_kernels.interface import CacheShape
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from pagedbatch.model.attention import PagedAttention
from pagedbatch.model.input_batch import InputBatch
from pagedbatch.model.padded_gemm import PaddedGemm, needs_padding
from pagedbatch.model.source_batch import EncoderBatch, SourceBatch


@dataclass(slots=True)
class CrossAttention:
    """What the cross-attention layers of a decoder share; its K and V are in the decoder's cache."""

    decoder: PagedAttention
    batch: SourceBatch | None = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, **_: Any) -> Tensor:
        """
        Args:
            query: [num_tokens, num_heads, head_size].
            key, value: [num_source_tokens, num_kv_heads, head_size] of the sources encoded in this step; ignored if
                there are none.
        """
        assert self.batch is not None
        decoder, encoder = self.decoder, self.batch.encoder
        with decoder.timed():
            if encoder is not None:
                decoder.backend.write_kv(key, value, decoder.cache[layer], encoder.slot_mapping)
            output = decoder.backend.paged_attention(query, decoder.cache[layer], self.batch.across, scale=scale)
        decoder.calls += 1
        return output


@dataclass(slots=True)
class EncoderAttention:
    """What the layers of an encoder share. Each overwrites the K and V of the one before it in a scratch cache."""

    decoder: PagedAttention  #: has the backend, and takes the time
    block_size: int
    position_bias: Sequence[Tensor] | None = None  #: of each layer
    batch: EncoderBatch | None = None
    _scratch: Tensor | None = None
    _num_blocks: int = 0

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, **_: Any) -> Tensor:
        """
        Args:
            query, key, value: [num_source_tokens, num_heads, head_size].
        """
        assert self.batch is not None
        backend, batch = self.decoder.backend, self.batch.attention
        bias = None if self.position_bias is None else self.position_bias[layer]
        with self.decoder.timed():
            cache = self._cache(key, self.batch.num_blocks)
            backend.write_kv(key, value, cache, batch.slot_mapping)
            return backend.paged_attention(query, cache, batch, scale=scale, position_bias=bias)

    def _cache(self, key: Tensor, num_blocks: int) -> Tensor:
        if self._scratch is None or self._num_blocks < num_blocks:
            self._scratch = None  # before its successor takes memory
            self._num_blocks = num_blocks
            shape = CacheShape(1, self.block_size, key.shape[1], key.shape[2])
            self._scratch = self.decoder.backend.allocate_cache(shape, num_blocks, key.dtype, key.device)
        return self._scratch[0]


class StepPositions(nn.Module):
    """Stands for a module of position embeddings, which would count from the beginning of the flat batch.

    Args:
        original: the module.
        table: its embeddings, [max_positions, hidden_size].
    """

    def __init__(self, original: nn.Module, table: Tensor) -> None:
        super().__init__()
        self.original = original
        self._table = table
        self.position_ids: Tensor | None = None  #: int64 [1, num_tokens] of the step

    def forward(self, *_: Any, **__: Any) -> Tensor:
        return self._table[self.position_ids]


class EncoderDecoderForward:
    """Logits of the decoder's tokens, after it encoded the step's new sources.

    Args:
        block_size: of the scratch cache.
        max_positions: no source and no output is longer, in tokens.
    """

    def __init__(self, model: Any, attention: PagedAttention, *, block_size: int, max_positions: int) -> None:
        self._model = model
        self._encoder, decoder = model.get_encoder(), model.get_decoder()
        self._attention = attention
        self._cross = CrossAttention(attention)
        self._own = EncoderAttention(attention, block_size)
        self._num_calls = _bind(self._encoder, decoder, attention, self._cross, self._own)
        attention.position_bias = position_biases(decoder)
        self._own.position_bias = position_biases(self._encoder)
        self._source_positions = _replace_positions(self._encoder, max_positions)
        self._target_positions = _replace_positions(decoder, max_positions)
        self._gemm_mode = PaddedGemm() if needs_padding(model) else contextlib.nullcontext()
        self._no_source = torch.zeros(1, 1, self._encoder.config.hidden_size, dtype=model.dtype, device=model.device)
        self._logits_indices: Tensor | None = None
        head = model.get_output_embeddings()
        if hasattr(head, "logits_hook"):  # of another runner with this model
            head.logits_hook.remove()
        head.logits_hook = head.register_forward_pre_hook(self._take_needed)

    def __call__(self, batch: InputBatch) -> Tensor:
        """
        Raises:
            RunError: a layer computed its attention without the KV pool.
        """
        assert batch.source is not None
        self._cross.batch, self._logits_indices = batch.source, batch.logits_indices
        with self._gemm_mode:
            encoded = self._no_source if batch.source.encoder is None else self._encode(batch.source.encoder)
            if self._target_positions is not None:
                self._target_positions.position_ids = batch.position_ids
            output = self._model(
                decoder_input_ids=batch.input_ids,
                encoder_outputs=BaseModelOutput(last_hidden_state=encoded),
                use_cache=False,
            )
        self._attention.check_calls(self._num_calls, self._model.config.model_type)
        logits: Tensor = output.logits[0]
        return logits

    def _encode(self, batch: EncoderBatch) -> Tensor:
        """[1, num_source_tokens, hidden_size]."""
        self._own.batch = batch
        if self._source_positions is not None:
            self._source_positions.position_ids = batch.position_ids
        encoded: Tensor = self._encoder(input_ids=batch.input_ids).last_hidden_state
        return encoded

    def _take_needed(self, _: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        """The output layer sees only positions whose logits are needed."""
        return (inputs[0][:, self._logits_indices],)


def _bind(
    encoder: nn.Module, decoder: nn.Module, own: PagedAttention, cross: CrossAttention, within: EncoderAttention
) -> int:
    """Binds every attention layer. Returns how many of them are the decoder's."""
    num_layers = 0
    for stack, by_causality in ((encoder, {False: within}), (decoder, {True: own, False: cross})):
        for module in stack.modules():
            if hasattr(module, "layer_idx") and hasattr(module, "is_causal"):
                module.paged_attention = by_causality[module.is_causal]  # type: ignore[assignment,index]
                num_layers += stack is decoder
    return num_layers


def position_biases(stack: Any) -> list[Tensor] | None:
    """T5's bias of each self-attention layer by key's minus query's position: float32 [num_heads, 2 * reach - 1].

    None if the stack has none. All distances of `reach` and more are in one bucket (T5, arXiv 1910.10683, 2.1). The
    modules make no biases of their own any more: they would be of the whole flat batch's size.
    """
    layers = [module for module in stack.modules() if getattr(module, "has_relative_attention_bias", False)]
    if not layers:
        return None
    biases = []
    for layer in layers:
        reach = layer.relative_attention_max_distance + 1
        with torch.inference_mode():  # of one query, in the middle of as many keys
            table = type(layer).compute_bias(layer, 1, 2 * reach - 1, past_seen_tokens=reach - 1)
        biases.append(table[0, :, 0].float().contiguous().clone())
        layer.compute_bias = _NoBias(table.new_zeros(1, 1, 1, 1))
    num_layers = sum(hasattr(module, "SelfAttention") for module in stack.modules())
    return biases if len(biases) == num_layers else biases * num_layers  # T5's first layer has that of all


@dataclass(frozen=True, slots=True)
class _NoBias:
    zeros: Tensor

    def __call__(self, *_: Any, **__: Any) -> Tensor:
        return self.zeros


def position_table(stack: Any, max_positions: int) -> Tensor | None:
    """The position embeddings of a stack, [max_positions, hidden_size]. None: it has none."""
    original: Any = getattr(stack, "embed_positions", None)
    if original is None:
        return None
    if isinstance(original, StepPositions):  # of another runner with this model
        original = original.original
    with torch.inference_mode():
        if hasattr(original, "make_weights"):  # M2M100's counts ids that are no padding
            table = original(torch.full((1, max_positions), original.padding_idx + 1, device=stack.device))[0]
        else:
            offset = getattr(original, "offset", 0)
            table = original.weight[offset : offset + max_positions]
        own: Tensor = table.to(stack.dtype, copy=True)
    return own


def _replace_positions(stack: Any, max_positions: int) -> StepPositions | None:
    """Puts `StepPositions` in the place of a stack's position embeddings. None: it has none."""
    table = position_table(stack, max_positions)
    if table is None:
        return None
    original = getattr(stack.embed_positions, "original", stack.embed_positions)
    positions = StepPositions(original, table)
    stack.embed_positions = positions
    return positions

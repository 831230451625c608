"""The size of a simulated pool, from a model's config, from its shape, or in blocks alone."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from pagedbatch.errors import UsageError

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_DEFAULT_CONTEXT = 2048


@dataclass(frozen=True, slots=True)
class KVShape:
    """The shape of a model's KV cache, from flags: all three or none."""

    num_layers: int | None
    num_kv_heads: int | None
    head_dim: int | None

    @property
    def num_values(self) -> int | None:
        """Numbers in K and V of one token in all layers; None: no flag was given.

        Raises:
            UsageError: only some of the flags were given.
        """
        if self.num_layers and self.num_kv_heads and self.head_dim:
            return 2 * self.num_layers * self.num_kv_heads * self.head_dim
        if any(astuple(self)):
            raise UsageError("a shape is --num-layers, --num-kv-heads and --head-dim: give all three")
        return None


@dataclass(frozen=True, slots=True)
class PoolShape:
    """`token_bytes` is 0 if the size of K and V is unknown."""

    max_model_len: int
    token_bytes: int


def pool_shape(model: str | None, shape: KVShape, dtype: str, max_model_len: int | None) -> PoolShape:
    """Context and bytes per token. A model's context can be shortened, not lengthened.

    Raises:
        UsageError: model and shape are both given, the shape is not whole, or there is no such model.
    """
    num_values = shape.num_values
    if model is None:
        return PoolShape(max_model_len or _DEFAULT_CONTEXT, (num_values or 0) * _DTYPE_BYTES[dtype])
    if num_values is not None:
        raise UsageError("--model says what --num-layers, --num-kv-heads and --head-dim do: give one or the other")
    import torch

    from pagedbatch.model.hf_config import load_config
    from pagedbatch.model.model_config import ModelConfig

    config = ModelConfig.from_hf(load_config(model))
    return PoolShape(
        max_model_len=min(max_model_len or config.context.tokens, config.context.tokens),
        token_bytes=config.token_bytes(getattr(torch, dtype)),
    )


def num_pool_blocks(
    shape: PoolShape, num_blocks: int | None, kv_memory: int | None, max_num_seqs: int, block_size: int
) -> int:
    """Number of blocks: as given, as fit into the memory given, or enough for all sequences at full length.

    Raises:
        UsageError: memory is given, but the size of a block is unknown.
    """
    if num_blocks is not None:
        return num_blocks
    if kv_memory is None:
        return max_num_seqs * -(-shape.max_model_len // block_size)
    if not shape.token_bytes:
        raise UsageError("--kv-memory needs --model or its shape, to know how large a block is; or give --num-blocks")
    return max(1, kv_memory // (shape.token_bytes * block_size))

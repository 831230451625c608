"""Bytes: of the weights, of a token's K and V, of the pool that a run would make. No weights are read or made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagedbatch.settings import RunSettings

if TYPE_CHECKING:
    from pagedbatch.model.model_defaults import ModelDefaults


@dataclass(frozen=True, slots=True)
class Sizes:
    """`free_bytes` are free on the device now, without weights; by default a pool takes at most `usable_bytes`."""

    num_parameters: int
    weight_bytes: int
    dtype: str
    device: str
    token_bytes: int
    block_size: int
    block_bytes: int
    num_blocks: int
    num_swap_blocks: int
    free_bytes: int
    usable_bytes: int

    @property
    def pool_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def fits(self) -> bool:
        """Whether weights and pool fit on the device."""
        return self.weight_bytes + self.pool_bytes <= self.free_bytes


def estimate_sizes(settings: RunSettings, defaults: ModelDefaults) -> Sizes:
    """The sizes of a run with these settings on this machine.

    Raises:
        UsageError: no such device, or no room for a block.
    """
    from pagedbatch.model.hf_config import load_config
    from pagedbatch.model.kv_cache import FREE_MEMORY_SHARE, choose_pool_size, free_memory
    from pagedbatch.model.loader import check_weights, choose_device, choose_dtype
    from pagedbatch.model.model_config import num_parameters

    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, defaults.config.dtype, device)
    check_weights(settings.model, trust_remote_code=settings.trust_remote_code, needed=False)
    parameters = num_parameters(load_config(settings.model, trust_remote_code=settings.trust_remote_code))
    weight_bytes = parameters * dtype.itemsize
    pool = choose_pool_size(
        defaults.config,
        dtype,
        device,
        max_model_len=defaults.max_model_len,
        block_size=settings.block_size,
        num_blocks=settings.num_blocks,
        kv_memory=settings.kv_memory,
        swap_space=settings.swap_space,
        max_num_seqs=settings.max_num_seqs,
        reserved_bytes=weight_bytes,
    )
    free = free_memory(device)
    return Sizes(
        num_parameters=parameters,
        weight_bytes=weight_bytes,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        token_bytes=defaults.config.token_bytes(dtype),
        block_size=settings.block_size,
        block_bytes=pool.block_bytes,
        num_blocks=pool.num_blocks,
        num_swap_blocks=pool.num_swap_blocks,
        free_bytes=free,
        usable_bytes=int(max(0, free - weight_bytes) * FREE_MEMORY_SHARE[device.type]),
    )

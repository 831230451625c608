"""The Triton backend: the functions of `interface.Backend`. Importing it needs triton, but no GPU."""

from pagedbatch_kernels.triton_attention import paged_attention
from pagedbatch_kernels.triton_cache import allocate_cache, copy_blocks, swap_blocks, write_kv

__all__ = ["allocate_cache", "copy_blocks", "paged_attention", "swap_blocks", "write_kv"]

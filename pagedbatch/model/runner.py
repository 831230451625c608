"""Executes a scheduled step on the device: moves blocks, runs one forward, samples.

Everything that touches the device happens here or below; ids and small lists go in and come out.
"""

from __future__ import annotations

import time

import torch
from pagedbatch_kernels.interface import AttentionShape, Backend
from pagedbatch_kernels.sampling import SamplingOps

from pagedbatch.model.attention import PagedAttention
from pagedbatch.model.backends import choose_backend, choose_sampling_ops
from pagedbatch.model.forward import ForwardName, choose_forward
from pagedbatch.model.input_batch import InputBatcher, sampled_sequences
from pagedbatch.model.kv_cache import KVCache, choose_pool_size
from pagedbatch.model.loader import LoadedModel
from pagedbatch.model.prompt_logprobs import score_prompts
from pagedbatch.model.sampler import Sampler
from pagedbatch.step import ModelRunnerOutput, SchedulerOutput, StepSeconds


class ModelRunner:
    """A loaded model, its KV cache, an attention backend and sampling ops."""

    def __init__(
        self,
        loaded: LoadedModel,
        backend_name: str,
        backend: Backend,
        cache: KVCache,
        sampling_ops: SamplingOps,
        *,
        forward: ForwardName = "auto",
        keep_model: bool = True,
    ) -> None:
        self._dtype = loaded.dtype
        self.backend_name = backend_name
        self._cache = cache
        self._attention = PagedAttention(backend, cache.device_cache)
        self.forward_name, self._forward = choose_forward(
            forward,
            loaded.model,
            self._attention,
            backend_name=backend_name,
            num_layers=cache.shape.num_layers,
            block_size=cache.shape.block_size,
            max_positions=loaded.defaults.max_model_len,
            keep_model=keep_model,
        )
        attention = AttentionShape(
            num_heads=loaded.config.num_heads,
            num_kv_heads=cache.shape.num_kv_heads,
            head_size=cache.shape.head_size,
            itemsize=loaded.dtype.itemsize,
        )
        costs = backend.prefix_costs(attention, loaded.device)
        self._make_batch = InputBatcher(cache.shape.block_size, loaded.device, costs)
        self._sampling_ops = sampling_ops
        self._num_token_ids = loaded.defaults.num_token_ids
        self._sampler = Sampler(loaded.defaults.eos_token_ids, sampling_ops, self._num_token_ids)

    @classmethod
    def create(
        cls,
        loaded: LoadedModel,
        *,
        attention: str = "auto",
        forward: ForwardName = "auto",
        keep_model: bool = True,
        block_size: int = 16,
        num_blocks: int | None = None,
        kv_memory: int | None = None,
        swap_space: int = 0,
        max_num_seqs: int = 128,
        memory_share: float = 1.0,
    ) -> ModelRunner:
        """Sizes and allocates the pools.

        Args:
            attention: the backend's name, or "auto".
            forward: "hf" (formerly "plain") for that of transformers; "auto" takes the fused one if there is one.
            keep_model: False lets the runner take the weights out of `loaded.model`, which can't be called afterwards.
            num_blocks, kv_memory: the size of the pool in blocks or in bytes; neither: a share of the free memory.
            swap_space: bytes of host memory for preempted groups.
            max_num_seqs: limits a pool whose size is not given to this many sequences of the maximum length.
            memory_share: share of a CPU's free memory that this runner may use; other processes take the rest.

        Raises:
            UsageError: no such backend, or no memory for the pools.
        """
        backend_name, backend = choose_backend(attention, loaded.device)
        size = choose_pool_size(
            loaded.config,
            loaded.dtype,
            loaded.device,
            max_model_len=loaded.defaults.max_model_len,
            block_size=block_size,
            num_blocks=num_blocks,
            kv_memory=kv_memory,
            swap_space=swap_space,
            max_num_seqs=max_num_seqs,
            memory_share=memory_share,
        )
        shape = loaded.config.cache_shape(block_size)
        cache = KVCache(backend, shape, size.num_blocks, size.num_swap_blocks, loaded.dtype, loaded.device)
        sampling_ops = choose_sampling_ops(attention, backend_name, loaded.device)
        return cls(loaded, backend_name, backend, cache, sampling_ops, forward=forward, keep_model=keep_model)

    @property
    def num_blocks(self) -> int:
        return self._cache.num_blocks

    @property
    def num_swap_blocks(self) -> int:
        return self._cache.num_swap_blocks

    @property
    def block_bytes(self) -> int:
        return self._cache.shape.block_bytes(self._dtype)

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Runs one step: swaps and copies blocks, runs one forward of the flat batch, then samples."""
        began = time.perf_counter()
        self._cache.apply(step.swap_out, step.swap_in, step.copies)
        swap_seconds = time.perf_counter() - began if step.swap_out or step.swap_in else 0.0
        batch = self._make_batch(step)
        self._attention.begin_step(batch.attention)
        logits = self._forward(batch)
        forwarded = time.perf_counter()
        samples, beams = self._sampler(logits, step)
        scored = logits[len(sampled_sequences(step)) :]
        prompts = score_prompts(scored, step.prompts, self._sampling_ops, self._num_token_ids)
        ended = time.perf_counter()
        seconds = StepSeconds(
            model=forwarded - began - self._attention.seconds,
            attention=self._attention.seconds,
            sampling=ended - forwarded,
            swap=swap_seconds,
        )
        return ModelRunnerOutput(samples, beams, seconds, prompts)

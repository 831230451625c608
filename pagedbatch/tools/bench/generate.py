"""Hugging Face's side of a benchmark: `generate` on padded batches, in a process of its own.

The question has `model`, `dtype`, `device`, `prompts` (a file of token ids), `kwargs` of `generate`, `batch_sizes` and
`max_seconds`. Prompts are sorted, longest first, so that the prompts of a batch have similar lengths.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, GenerationConfig

from pagedbatch.errors import RunError
from pagedbatch.model.model_config import auto_model
from pagedbatch.tools.bench.processes import answer

#: Larger batches are tried while the speed grows at least by this factor.
_MIN_GAIN = 1.05
#: Padding before short prompts; it is masked, so any token will do.
_PAD = 0


class Generator:
    """A model and its prompts."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._device = spec["device"]
        self._kwargs = spec["kwargs"]
        self.prompts: list[list[int]] = sorted(json.loads(Path(spec["prompts"]).read_text()), key=len, reverse=True)
        self._has_encoder = bool(AutoConfig.from_pretrained(spec["model"]).is_encoder_decoder)
        kind = auto_model(is_encoder_decoder=self._has_encoder)
        self._model = kind.from_pretrained(spec["model"], dtype=getattr(torch, spec["dtype"]), use_safetensors=True)
        self._model.to(self._device).eval()
        # No end token, and no defaults of the model: `pagedbatch run` is run without them, too.
        start = getattr(self._model.config, "decoder_start_token_id", None)
        self._model.generation_config = GenerationConfig(pad_token_id=_PAD, decoder_start_token_id=start)

    def run(self, prompts: Sequence[list[int]]) -> int:
        """Answers one batch; the number of tokens that were generated.

        Raises:
            RunError: it is not the number that was asked for.
        """
        width, ones = max(map(len, prompts)), [[1] * len(prompt) for prompt in prompts]
        padded, mask = (torch.tensor([self._padded(row, width) for row in rows]) for rows in (prompts, ones))
        output: Tensor = self._model.generate(
            input_ids=padded.to(self._device),
            attention_mask=mask.to(self._device),
            **self._kwargs,
        )
        num_outputs, length = output.shape[0], output.shape[1] - (1 if self._has_encoder else width)
        asked = (len(prompts) * self._kwargs["num_return_sequences"], self._kwargs["max_new_tokens"])
        if (num_outputs, length) != asked:
            raise RunError(f"generate gave {num_outputs} outputs of {length} tokens, and not {asked[0]} of {asked[1]}")
        return num_outputs * length

    def _padded(self, row: list[int], width: int) -> list[int]:
        """Outputs follow a prompt, and so its padding is on the left; of a source, positions count from the left."""
        padding = [_PAD] * (width - len(row))
        return row + padding if self._has_encoder else padding + row


def best_batch_size(generator: Generator, sizes: Sequence[int], max_seconds: float) -> tuple[int, dict[int, float]]:
    """The size with the most tokens per second on one batch from the middle of the prompts, and the speed of each.

    Sizes are tried in ascending order, until the speed hardly grows or the time is up.
    """
    rates: dict[int, float] = {}
    best = 0.0
    began = time.perf_counter()
    prompts = generator.prompts
    for size in sorted({min(size, len(prompts)) for size in sizes}):
        start = max(0, (len(prompts) - size) // 2)
        before = time.perf_counter()
        tokens = generator.run(prompts[start : start + size])
        rates[size] = round(tokens / (time.perf_counter() - before), 3)
        if rates[size] < _MIN_GAIN * best or time.perf_counter() - began > max_seconds:
            break
        best = rates[size]
    return max(rates, key=lambda size: rates[size]), rates


@torch.inference_mode()
def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """The speed of `generate` on the prompts, or on as many whole batches of them as the time allows."""
    generator = Generator(spec)
    generator.run(generator.prompts[-1:])  # warms up
    size, rates = best_batch_size(generator, spec["batch_sizes"], spec["max_seconds"] / 2)
    batches = [generator.prompts[i : i + size] for i in range(0, len(generator.prompts), size)]
    # From the middle outwards: if the time is too short for all, those measured are of medium length.
    order = sorted(range(len(batches)), key=lambda i: abs(i - len(batches) // 2))
    tokens = answered = 0
    began = time.perf_counter()
    for i in order:
        tokens += generator.run(batches[i])
        answered += len(batches[i])
        seconds = time.perf_counter() - began
        if seconds > spec["max_seconds"] / 2:
            break
    return {
        "output_tokens": tokens,
        "prompts": answered,
        "seconds": round(seconds, 4),
        "tokens_per_second": round(tokens / seconds, 3),
        "batch_size": size,
        "tokens_per_second_by_batch_size": rates,
    }


if __name__ == "__main__":
    answer(measure)

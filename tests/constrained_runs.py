"""Runs within a catalog on a fixture model, and the scores of all its items by brute force."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import torch
from engines import Run, hf_model, paged_model, run_engine, tokenizer

from pagedbatch.constraints.catalog import CatalogConstraint, TokenTrie, pack
from pagedbatch.outputs import CompletionOutput
from pagedbatch.params import GenerationParams
from pagedbatch.sequence import Request

Item = tuple[int, ...]


def encode(path: Path, text: str) -> Item:
    return tuple(tokenizer(path)(text, add_special_tokens=False)["input_ids"])


def catalog(items: Iterable[Sequence[int]], params: GenerationParams, ends: Iterable[int]) -> CatalogConstraint:
    trie = TokenTrie.build(pack(item) for item in items)
    return CatalogConstraint(trie, tuple(sorted(ends)), params.min_tokens, params.max_tokens)


def ends_of(path: Path) -> frozenset[int]:
    return paged_model(path).defaults.eos_token_ids


def run_one(path: Path, prompt: Sequence[int], params: GenerationParams, items: Iterable[Sequence[int]]) -> Run:
    constraint = catalog(items, params, ends_of(path))
    request = Request(0, list(prompt), params, rng_key=5, constraint=constraint)
    return run_engine(path, [request], num_blocks=200 + 2 * params.num_beams)


def exhaustive(path: Path, prompt: Sequence[int], outputs: list[Item]) -> dict[Item, float]:
    """The summed logprob of each output after the prompt."""
    sums = beginnings(path, prompt, outputs)
    return {output: sums[output] for output in outputs}


def beginnings(path: Path, prompt: Sequence[int], outputs: list[Item]) -> dict[Item, float]:
    """The summed logprob of each output and of all that it begins with, by Hugging Face's forward of the whole text."""
    model = hf_model(path)
    found: dict[Item, float] = {}
    for _, group in itertools.groupby(sorted(outputs, key=len), key=len):
        alike = list(group)
        for start in range(0, len(alike), 512):
            chunk = torch.tensor([[*prompt, *output] for output in alike[start : start + 512]])
            with torch.inference_mode():
                logprobs = model(chunk).logits[:, len(prompt) - 1 : -1].log_softmax(-1)
            sums = logprobs.gather(2, chunk[:, len(prompt) :, None]).squeeze(2).cumsum(1).tolist()
            for output, own in zip(alike[start : start + 512], sums, strict=True):
                found |= {output[: length + 1]: total for length, total in enumerate(own)}
    return found


def ranked(sums: dict[Item, float], length_penalty: float) -> list[tuple[Item, float]]:
    scores = {output: total / len(output) ** length_penalty for output, total in sums.items()}
    return sorted(scores.items(), key=lambda entry: -entry[1])


def assert_same_ranking(outputs: list[CompletionOutput], expected: list[tuple[Item, float]]) -> None:
    assert [tuple(output.token_ids) for output in outputs] == [output for output, _ in expected]
    assert [output.score for output in outputs] == pytest.approx([score for _, score in expected], abs=1e-4)

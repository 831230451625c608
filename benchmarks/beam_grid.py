"""Every combination of what shapes a beam search, compared with `generate`.

    PYTHONPATH=tests python benchmarks/beam_grid.py [table|rand|stories ...]

It takes minutes per model, so `test_beam_grid.py` runs only a sample. Compared are the texts, their order, and their
scores within 1e-4.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from engines import hf_model, run_engine, tokenizer
from models import rand_model, table_model
from safetensors.torch import load_file, save_file

from pagedbatch.params import GenerationParams
from pagedbatch.sequence import Request

SCORE_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Setting:
    """One point of the grid. `more_ends` adds end tokens to the model's own."""

    num_beams: int
    length_penalty: float
    early_stopping: bool | str
    min_tokens: int
    more_ends: bool
    repetition_penalty: float
    no_repeat_ngram_size: int


EARLY_STOPPING: tuple[bool | str, ...] = (False, True, "never")
GRID = [
    Setting(num_beams, length_penalty, early_stopping, min_tokens, more_ends, repetition_penalty, ngram_size)
    for num_beams in (1, 2, 3, 4, 8)
    for length_penalty in (-1.0, 0.0, 0.6, 1.0, 2.0)
    for early_stopping in EARLY_STOPPING
    for min_tokens in (0, 5)
    for more_ends in (False, True)
    for repetition_penalty in (1.0, 1.3)
    for ngram_size in (0, 2)
]


@dataclass(frozen=True)
class Subject:
    """A model with its prompts; a setting takes one of them by its place in the grid."""

    path: Path
    prompts: list[list[int]]
    eos_token_ids: tuple[int, ...]
    more_end_ids: tuple[int, ...]
    max_tokens: int

    @classmethod
    def table(cls, folder: Path) -> Subject:
        """Makes the table model with its odds, and what the context does to them, stirred a little.

        Else many texts would have equal scores, whose order `generate` leaves open.
        """
        path = folder / "stirred"
        table_model(path)
        weights = load_file(path / "model.safetensors")
        for name in ("lm_head.weight", "model.layers.0.self_attn.o_proj.weight"):
            weights[name] += 0.02 * torch.rand(weights[name].shape, generator=torch.Generator().manual_seed(0))
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        ids = tokenizer(path)
        f, n = ids("fn").input_ids
        return cls(path, [ids(text).input_ids for text in ("a", "m", "ba", "z", "t")], (2,), (3, f, n), 9)

    @classmethod
    def rand(cls, path: Path) -> Subject:
        rng = random.Random(2)
        prompts = [[1] + [rng.randrange(4, 256) for _ in range(rng.randrange(2, 30))] for _ in range(5)]
        return cls(path, prompts, (2, 3), tuple(range(40, 60)), 14)

    @classmethod
    def stories(cls, path: Path) -> Subject:
        ids = tokenizer(path)
        texts = ("Once upon a time", "Tom and Lily went to the park. They saw a", "The end. One day, a cat")
        stops = tuple(ids.convert_tokens_to_ids([".", "!", "▁and"]))
        return cls(path, [ids(text).input_ids for text in texts], (2,), stops, 20)

    def prompt(self, setting: Setting) -> list[int]:
        return self.prompts[GRID.index(setting) % len(self.prompts)]

    def end_ids(self, setting: Setting) -> tuple[int, ...]:
        return self.eos_token_ids + (self.more_end_ids if setting.more_ends else ())

    def params(self, setting: Setting) -> GenerationParams:
        return GenerationParams(
            num_beams=setting.num_beams,
            n=setting.num_beams,
            max_tokens=self.max_tokens,
            length_penalty=setting.length_penalty,
            early_stopping=setting.early_stopping,
            min_tokens=setting.min_tokens,
            stop_token_ids=self.more_end_ids if setting.more_ends else (),
            repetition_penalty=setting.repetition_penalty,
            no_repeat_ngram_size=setting.no_repeat_ngram_size,
        )

    def by_hf(self, setting: Setting) -> list[tuple[list[int], float | None]]:
        """(generated ids, score) of what `generate` returns; greedy decoding has no score."""
        prompt, end_ids = self.prompt(setting), self.end_ids(setting)
        options: dict[str, Any] = {"repetition_penalty": setting.repetition_penalty}
        if setting.num_beams > 1:
            options |= {"length_penalty": setting.length_penalty, "early_stopping": setting.early_stopping}
        if setting.min_tokens:
            options["min_new_tokens"] = setting.min_tokens
        if setting.no_repeat_ngram_size:
            options["no_repeat_ngram_size"] = setting.no_repeat_ngram_size
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            found = hf_model(self.path).generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=self.max_tokens,
                num_beams=setting.num_beams,
                num_return_sequences=setting.num_beams,
                do_sample=False,
                eos_token_id=list(end_ids),
                output_scores=True,
                return_dict_in_generate=True,
                **options,
            )
        rows = [_cut(row[len(prompt) :].tolist(), end_ids) for row in found.sequences]
        scores = found.sequences_scores.tolist() if setting.num_beams > 1 else [None]
        return list(zip(rows, scores, strict=True))

    def differences(self, settings: list[Setting]) -> list[str]:
        """Where ours, all in one run, differ from `generate`."""
        requests = [Request(i, self.prompt(setting), self.params(setting)) for i, setting in enumerate(settings)]
        run = run_engine(self.path, requests, num_blocks=6000)
        return [
            f"{setting}: {ours} is {theirs} in generate"
            for i, setting in enumerate(settings)
            for ours, theirs in itertools.zip_longest(
                [(output.token_ids, output.score) for output in run.outputs[i].outputs], self.by_hf(setting)
            )
            if not _agree(ours, theirs)
        ]


Found = tuple[list[int], float | None]


def _agree(ours: Found | None, theirs: Found | None) -> bool:
    if ours is None or theirs is None or ours[0] != theirs[0]:
        return False
    if ours[1] is None or theirs[1] is None:
        return ours[1] is theirs[1]
    return abs(ours[1] - theirs[1]) <= max(SCORE_TOLERANCE, 1e-5 * abs(theirs[1]))


def _cut(token_ids: list[int], end_ids: tuple[int, ...]) -> list[int]:
    """Up to and with the first end token: `generate` pads what is finished."""
    ends = [i for i, token_id in enumerate(token_ids) if token_id in end_ids]
    return token_ids[: ends[0] + 1] if ends else token_ids


def main(names: list[str]) -> int:
    torch.set_num_threads(1)
    num_different = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            path = Path(folder) / name
            if name == "rand":
                rand_model(path)
            elif name == "stories":
                path = Path(os.environ["PAGEDBATCH_SHARED"]) / "models" / "stories260K-hf"
            subject: Subject = getattr(Subject, name)(path)
            found = subject.differences(GRID)
            print(*found, f"{name}: {len(GRID)} settings, {len(found)} outputs differ", sep="\n", flush=True)
            num_different += len(found)
    return 1 if num_different else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["table", "rand", "stories"]))

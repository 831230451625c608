"""The work of a benchmark: prompts, and what is generated for each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from pagedbatch.errors import RowError, UsageError
from pagedbatch.input.fields.field_table import PROMPT_FIELDS
from pagedbatch.input.reader import open_source

#: A prompt as a row that `pagedbatch run` reads: one of `PROMPT_FIELDS`.
Prompt = dict[str, Any]

JOB_NAMES = ("greedy", "sampling", "beams")


@dataclass(frozen=True, slots=True)
class BenchJob:
    """`n` outputs of `max_tokens` tokens for every prompt; end tokens are ignored, so that both sides write as many."""

    name: str
    n: int
    num_beams: int
    max_tokens: int

    @property
    def generation(self) -> dict[str, Any]:
        """The settings of `pagedbatch run`."""
        fixed = {"n": self.n, "max_tokens": self.max_tokens, "ignore_eos": True, "generation_config": "none"}
        if self.num_beams > 1:
            return {**fixed, "num_beams": self.num_beams}
        if self.n > 1:
            return {**fixed, "temperature": 1.0, "top_p": 0.95}
        return {**fixed, "temperature": 0.0}

    @property
    def generate_kwargs(self) -> dict[str, Any]:
        """The same as arguments of Hugging Face's `generate`."""
        fixed = {"max_new_tokens": self.max_tokens, "min_new_tokens": self.max_tokens, "num_return_sequences": self.n}
        if self.num_beams > 1:
            return {**fixed, "do_sample": False, "num_beams": self.num_beams}
        if self.n > 1:
            return {**fixed, "do_sample": True, "temperature": 1.0, "top_p": 0.95, "top_k": 0}
        return {**fixed, "do_sample": False}


def choose_jobs(names: Sequence[str], *, n: int, num_beams: int, max_tokens: int) -> list[BenchJob]:
    """The jobs called `names`, in that order.

    Raises:
        UsageError: there is no such job.
    """
    known = {
        "greedy": BenchJob("greedy", 1, 1, max_tokens),
        "sampling": BenchJob("sampling", n, 1, max_tokens),
        "beams": BenchJob("beams", num_beams, num_beams, max_tokens),
    }
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise UsageError(f"--jobs: {unknown[0] if unknown else ''!r} is none of {', '.join(JOB_NAMES)}")
    return [known[name] for name in names]


def built_in_prompts(count: int) -> list[Prompt]:
    """The first `count` built-in prompts, or all of them if there are fewer."""
    lines = (files("pagedbatch.tools.bench") / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines[:count]]


def read_prompts(path: str, count: int) -> list[Prompt]:
    """The first `count` prompts of any input that `pagedbatch run` reads, or all of them if there are fewer.

    Prompts are not repeated to reach `count`: the prefix cache would make the copies almost free. Other fields of a row
    are ignored: every job has its own settings.

    Raises:
        UsageError: the input or a row can't be read, or there is no row.
    """
    prompts: list[Prompt] = []
    for row in open_source(path).rows(count):
        if row.error is not None:
            raise UsageError(row.error)
        try:
            fields = row.columns()
        except RowError as error:
            raise UsageError(f"{row.place}: {error}") from None
        prompts.append({name: fields[name] for name in PROMPT_FIELDS if name in fields})
    if not prompts:
        raise UsageError(f"{path}: there is no row in it")
    return prompts


def write_prompts(prompts: Sequence[Prompt], path: Path) -> None:
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts), encoding="utf-8")

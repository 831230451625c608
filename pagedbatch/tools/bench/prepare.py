"""The first process of a benchmark: checks that the model runs here and that each prompt leaves room for its output.

Its answer is what both sides need: where the model is, its precision, and the prompts as token ids.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from pagedbatch.errors import RowError, UsageError
from pagedbatch.input.reader import open_source
from pagedbatch.model.hf_config import load_config
from pagedbatch.model.loader import choose_device, choose_dtype
from pagedbatch.model.model_config import num_parameters
from pagedbatch.run.setup import TokenizerSetup, set_up_tokenizer
from pagedbatch.settings import merge
from pagedbatch.tools.bench.dummy_model import dummy_prompts, make_dummy_model, readable_config
from pagedbatch.tools.bench.processes import answer
from pagedbatch.tools.bench.workload import write_prompts


def prepare(question: dict[str, Any]) -> dict[str, Any]:
    """Finds errors before minutes are spent.

    The question has `model`, `run_flags`, `rows` (a file of prompts), `own_prompts` (whether the user gave them),
    `num_prompts`, `max_tokens`, `dummy_weights`, `dummy_length`, and `folder`, a place for what is made here.

    Raises:
        UsageError: the model can't run here, or a prompt is wrong or too long.
    """
    model, folder, rows, flags = (
        question["model"],
        Path(question["folder"]),
        Path(question["rows"]),
        question["run_flags"],
    )
    device = choose_device(flags["device"])
    if question["dummy_weights"]:
        model = readable_config(model, folder / "config")
    config = load_config(model)
    dtype = choose_dtype(flags["dtype"], getattr(config, "dtype", None), device)
    if question["dummy_weights"]:
        has_tokenizer = make_dummy_model(model, folder / "model", dtype)
        model = str(folder / "model")
        if not question["own_prompts"]:
            write_prompts(dummy_prompts(question["num_prompts"], question["dummy_length"], config.vocab_size), rows)
        elif not has_tokenizer:
            _refuse_texts(rows)
    settings = {**flags, "input": str(rows), "model": model, "output": "-", "generation_config": "none"}
    prompts = _token_ids(rows, set_up_tokenizer(merge(settings, {}), None), question["max_tokens"])
    (folder / "prompts.json").write_text(json.dumps(prompts), encoding="utf-8")
    return {
        "model": model,
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "weight_bytes": num_parameters(config) * dtype.itemsize,
        "prompts": str(folder / "prompts.json"),
        "num_prompts": len(prompts),
    }


def _refuse_texts(rows: Path) -> None:
    if any("prompt_token_ids" not in row.fields for row in open_source(str(rows)).rows()):
        raise UsageError("--dummy-weights: no tokenizer beside the config: give prompt_token_ids, or no PROMPTS")


def _token_ids(rows: Path, tokenizer_setup: TokenizerSetup, max_tokens: int) -> list[list[int]]:
    prompts = []
    longest = tokenizer_setup.defaults.max_model_len
    for row in open_source(str(rows)).rows():
        try:
            request = tokenizer_setup.prompts.request(row)
        except RowError as error:
            raise UsageError(str(error)) from None
        prompt = request.source_token_ids or request.prompt_token_ids
        if len(request.prompt_token_ids) + max_tokens > longest:
            sizes = f"{len(prompt)} prompt tokens and --max-tokens {max_tokens}"
            raise UsageError(f"{row.place}: {sizes} are more than the model's {longest}")
        prompts.append(list(prompt))
    return prompts


if __name__ == "__main__":
    answer(prepare)

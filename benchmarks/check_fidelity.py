"""Greedy decoding of real prompts against Hugging Face's `generate` in float32: `make fidelity`.

    PYTHONPATH=tests python benchmarks/check_fidelity.py MODEL PROMPTS.jsonl [COUNT [DTYPE]]

DTYPE (float32) is that of our run. A row may differ only where Hugging Face's two best logits are a near tie: there
rounding decides. Each such place is printed; any other difference fails the check. No test runs it: it takes
minutes and needs a real model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from engines import hf_greedy, hf_model, run_engine, tokenizer

from pagedbatch.params import GenerationParams
from pagedbatch.sequence import Request

MAX_TOKENS = 64
#: Logits closer than this may change places. A bfloat16 logit between 16 and 32 is a multiple of 1/8.
NEAR_TIE = {"float32": 1e-4, "bfloat16": 0.25}


def main(model: str, prompts_file: str, count: str = "64", dtype: str = "float32") -> int:
    path = Path(model)
    lines = Path(prompts_file).read_text(encoding="utf-8").splitlines()[: int(count)]
    rows = [json.loads(line) for line in lines]
    prompts = [tokenizer(path)(row.get("prompt") or row["question"]).input_ids for row in rows]
    requests = [Request(i, prompt, GenerationParams(max_tokens=MAX_TOKENS)) for i, prompt in enumerate(prompts)]
    run = run_engine(path, requests, num_blocks=4000, attention="auto", dtype=dtype)
    worse = differing = 0
    for i, prompt in enumerate(prompts):
        ours = run.outputs[i].outputs[0].token_ids
        theirs = hf_greedy(path, prompt, MAX_TOKENS)
        if ours != theirs:
            same = next(k for k, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1])
            gap = top_two_gap(path, prompt + theirs[:same])
            print(f"row {i}: differs from token {same} on, where the top-2 logit gap is {gap:.2e}")
            differing += 1
            worse += gap >= NEAR_TIE[dtype]
    print(
        f"{len(prompts)} prompts, {MAX_TOKENS} new tokens, {dtype}: {differing} differ, "
        f"{worse} of them beyond a near tie ({NEAR_TIE[dtype]:g})"
    )
    return 1 if worse else 0


def top_two_gap(path: Path, token_ids: list[int]) -> float:
    """Distance of the two best logits after `token_ids`."""
    with torch.inference_mode():
        best = hf_model(path)(torch.tensor([token_ids])).logits[0, -1].topk(2).values
    return float(best[0] - best[1])


if __name__ == "__main__":
    torch.set_num_threads(2)
    sys.exit(main(*sys.argv[1:]))

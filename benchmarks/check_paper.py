"""The figures of the PagedAttention paper (arXiv 2309.06180) beside ours: `make paper`.

    python benchmarks/check_paper.py [MODEL PROMPTS.jsonl [ROWS]]

Sections 2.2 and 6.3: figure 2 (where contiguous memory goes) and figure 15 (what sharing saves, OPT-13B). The paper
gives the means of its traces' lengths, not their spread, so that ours is drawn: log-normal, every sample as long as its
request, all requests there from the start. With MODEL, beams are searched by it as well, on real prompts.
Prints a table in Markdown. It takes minutes, so no test runs it; `test_simulate.py` and `test_length_runner.py` test
what must be true.
"""

from __future__ import annotations

import sys
from itertools import islice
from typing import Any

from pagedbatch.config import EngineConfig
from pagedbatch.stats.schema import Memory
from pagedbatch.tools.simulate.simulate import simulate
from pagedbatch.tools.simulate.trace import SampleLengths, log_normal, script_trace

ALPACA, SHAREGPT = (19.31, 58.45), (161.31, 337.99)
#: Of the logarithm of the lengths: what brings the paper's own figures about.
SIGMA = {ALPACA: 1.0, SHAREGPT: 0.65}
NUMBERS = (2, 4, 6)
ALPACA_SAVES = (6.09, 8.53, 9.79)
BEAMS_SAVE = (37.56, 53.13, 55.16)
KV_USED = {"max": 20.4, "pow2": 26.8, "oracle": 38.2, "paged": 96.3}


def memory(means: tuple[float, float], count: int, sigma: float, *, beams: int = 1, **samples: Any) -> Memory:
    """The account of `count` requests, 64 sequences at once."""
    config = EngineConfig(num_blocks=10_000, max_model_len=2048, max_num_seqs=64, prefix_cache=False)
    lengths = islice(log_normal(*means, sigma, seed=0), count)
    scripted = script_trace(lengths, config.max_model_len, num_beams=beams, samples=SampleLengths(**samples))
    return simulate(scripted, config).account.memory()


def line(what: str, ours: list[float], paper: str) -> None:
    print(f"| {what} | {' / '.join(f'{100 * each:.1f}' for each in ours)} | {paper} |", flush=True)


def sampling() -> None:
    def saving(means: tuple[float, float], count: int, independent: bool = False) -> list[float]:
        found = (memory(means, count, SIGMA[means], n=n, independent=independent) for n in NUMBERS)
        return [each.sharing_saving for each in found]

    paper = " / ".join(map(str, ALPACA_SAVES))
    line("Alpaca, n = 2 / 4 / 6", saving(ALPACA, 1000), paper)
    line("the same, each sample ending by itself", saving(ALPACA, 1000, independent=True), paper)
    line("ShareGPT, n = 2 / 4 / 6", saving(SHAREGPT, 600), "16.2 to 30.5")


def contiguous() -> None:
    found = memory(SHAREGPT, 300, SIGMA[SHAREGPT])
    used = [*(use.used for use in found.contiguous.schemes().values()), found.kv_used]
    line(f"ShareGPT, KV used: {' / '.join(KV_USED)}", used, " / ".join(map(str, KV_USED.values())))


def beams() -> None:
    """The saving grows with the outputs' lengths, so with their spread: long searches weigh more."""
    paper = " / ".join(map(str, BEAMS_SAVE))
    for sigma in (0.0, 0.5, 1.0):
        found = [memory(ALPACA, 200, sigma, beams=width) for width in NUMBERS]
        saving = [1 - each.mean_live_blocks / each.mean_logical_blocks for each in found]
        line(f"Alpaca, 2 / 4 / 6 beams, simulated, sigma {sigma}", saving, paper)


def real_beams(model: str, prompts: str, count: str = "24") -> None:
    from beam_sharing import load, scripted, search

    runner, tokenizer = load(model)
    lengths = scripted(tokenizer, prompts, int(count))
    saving = [search(runner, lengths, width)[0] for width in NUMBERS]
    mean_in, mean_out = (sum(each) / len(lengths) for each in zip(*((len(p), o) for p, o in lengths), strict=True))
    line(
        f"real searches, {len(lengths)} prompts, {mean_in:.0f} tokens in, {mean_out:.0f} out",
        saving,
        " / ".join(map(str, BEAMS_SAVE)),
    )


def main(*real: str) -> None:
    print("| saved or used, % | ours | the paper |\n| --- | --- | --- |")
    sampling()
    contiguous()
    beams()
    if real:
        real_beams(*real)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Whether cost grows as it should. For a quiet machine, by hand.

    PYTHONPATH=tests python benchmarks/bench_growth.py [MODEL PROMPTS.jsonl]

The host half, around a runner that takes no time: its seconds per step with many rows waiting against few, and with a
large pool, all of whose blocks hold something, against a small one. With a model: tokens per second with more and more
rows at once, and what the peak memory of some runs holds beside weights, pool and swapped blocks. Give prompts enough.
"""

from __future__ import annotations

import gc
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tiny_job import EchoRunner

from pagedbatch.config import EngineConfig
from pagedbatch.engine.engine import Engine
from pagedbatch.output.stats_file import read_stats
from pagedbatch.params import GenerationParams
from pagedbatch.sequence import Request
from pagedbatch.stats.schema import Stats

PROMPT, OUTPUT = 64, 64  # tokens: 64 sequences of these take 512 of the smallest pool's blocks
STEPS = 1000
MIB = 2**20

#: Runs whose peaks differ in kind: at the start, in prompts that fill a pool, in samples that are preempted, and after
#: batches of ever other sizes.
PEAKS = {
    "one row": ("--limit", 1, "--max-tokens", 4, "--kv-memory", "32MiB", "--ignore-eos"),
    "prompts fill the pool": ("--limit", 384, "--max-tokens", 2, "--kv-memory", "1GiB", "--ignore-eos"),
    "8 beams": ("--limit", 16, "--num-beams", 8, "--n", 8, "--max-tokens", 64, "--kv-memory", "512MiB"),
    "4 samples, preempted": ("--limit", 64, "--n", 4, "--max-tokens", 64, "--kv-memory", "256MiB", "--ignore-eos"),
    "2 samples, ending anywhere": ("--limit", 256, "--n", 2, "--max-tokens", 96, "--kv-memory", "256MiB"),
}


class Load:
    """An engine in which `num_waiting` rows always wait, whatever finishes."""

    def __init__(self, num_blocks: int, num_waiting: int) -> None:
        config = EngineConfig(num_blocks=num_blocks, max_num_seqs=64, max_model_len=4096)
        self._engine = Engine(config, EchoRunner(num_blocks))
        self._random = random.Random(0)
        self._num_rows = 0
        self._fill(num_blocks)
        self._add(64 + num_waiting)

    def _add(self, count: int, prompt: int = PROMPT, output: int = OUTPUT) -> None:
        for _ in range(count):
            # The first rows have outputs of many lengths, so that later ones don't all come and go together.
            max_tokens = 1 + self._num_rows % output if self._num_rows < 64 else output
            params = GenerationParams(max_tokens=max_tokens, ignore_eos=True)
            self._engine.add(Request(self._num_rows, list(self._random.randbytes(prompt)), params, self._num_rows))
            self._num_rows += 1

    def _fill(self, num_blocks: int) -> None:
        """Long prompts, until every block has been taken, and half of them twice."""
        for _ in range(num_blocks * 3 // 2 // 128 + 1):
            self._add(1, prompt=128 * 16, output=1)
            while self._engine.has_unfinished:
                self._engine.step()
        self._num_rows = 0

    def host_seconds(self) -> float:
        """The mean of a step's host seconds over `STEPS` steps."""
        seconds = []
        for _ in range(STEPS):
            step = self._engine.step()
            self._add(len(step.finished))
            assert step.snapshot is not None
            seconds.append(step.snapshot.host_seconds)
        return statistics.mean(seconds)


def host_half() -> None:
    gc.set_threshold(100_000)  # as the command does
    print("host ms a step, 64 sequences                  against the first")
    for title, cases in (
        ("rows waiting", [(100_000, 100), (100_000, 10_000)]),
        ("blocks", [(1_000, 100), (100_000, 100), (1_000_000, 100)]),
    ):
        seconds = []
        for case in cases:
            gc.collect()
            seconds.append(Load(*case).host_seconds())
            count = case[1] if title == "rows waiting" else case[0]
            print(f"{count:>9,} {title:14} {seconds[-1] * 1000:8.3f} {seconds[-1] / seconds[0]:24.2f}", flush=True)


def run(model: str, folder: Path, *flags: object) -> tuple[Stats, int]:
    """The account of a run in a process of its own, and the peak of its memory in bytes."""
    output = folder / "out.jsonl"
    command = [sys.executable, "-c", "from pagedbatch.cli.app import main; main()", "run"]
    command += ["--model", model, "--output", str(output), "--restart", *map(str, flags)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0
    return read_stats(output.with_suffix(".stats.json")), usage.ru_maxrss * 1024


def with_model(model: str, prompts: str, folder: Path) -> None:
    print("rows at once   tokens/s   against the first")
    first = None
    for rows in (16, 64, 128, 256):
        flags = ("--max-num-seqs", rows, "--limit", rows, "--max-tokens", 64, "--kv-memory", "2GiB")
        stats, _ = run(model, folder, prompts, *flags, "--ignore-eos")
        speed = stats.throughput.output_tokens_per_second
        first = first or speed
        print(f"{rows:12} {speed:10.0f} {speed / first:19.2f}", flush=True)


def peaks(model: str, prompts: str, folder: Path) -> None:
    weights = sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))
    print(f"{'MiB at the peak':26}" + "".join(f"{name:>10}" for name in ("all", "weights", "pool", "swapped", "rest")))
    for title, flags in PEAKS.items():
        stats, peak = run(model, folder, prompts, *flags, "--dtype", "bfloat16")
        pool, swapped = stats.memory.pool_bytes, stats.memory.peak_swapped_blocks * stats.memory.block_bytes
        parts = (peak, weights, pool, swapped, peak - weights - pool - swapped)
        print(f"{title:26}" + "".join(f"{part / MIB:10.0f}" for part in parts), flush=True)


if __name__ == "__main__":
    host_half()
    if len(sys.argv) > 2:
        with tempfile.TemporaryDirectory() as temporary:
            with_model(sys.argv[1], sys.argv[2], Path(temporary))
            peaks(sys.argv[1], sys.argv[2], Path(temporary))

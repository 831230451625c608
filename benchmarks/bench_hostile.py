"""What fifty hostile rows among a thousand cost: the same job without and with them, and whether the others are equal.

    PYTHONPATH=tests python benchmarks/bench_hostile.py MODEL [ROWS]

Prompts are short questions, 16 tokens are written for each.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hostile import KINDS


def main() -> None:
    model = sys.argv[1]
    num_rows = int(sys.argv[2]) if len(sys.argv) > 2 else 1000
    healthy = [
        json.dumps({"id": f"healthy {i}", "prompt": f"What is {i} and {i * 7} together?"}).encode()
        for i in range(num_rows - len(KINDS))
    ]
    hostile = [make() for make in KINDS.values()]
    stride = len(healthy) // len(hostile)
    mixed = [line for i, one in enumerate(hostile) for line in (*healthy[i * stride : (i + 1) * stride], one)]
    mixed += healthy[len(hostile) * stride :]
    with tempfile.TemporaryDirectory() as scratch:
        seconds, records = {}, {}
        for name, lines in (("without", healthy), ("with", mixed)):
            seconds[name], records[name] = _run(Path(scratch), model, lines)
    print(
        f"without {seconds['without']:.1f} s, with {seconds['with']:.1f} s: {seconds['with'] / seconds['without']:.2f}"
    )
    print(f"{len(records['without'])} healthy rows, equal: {records['with'] == records['without']}")


def _run(folder: Path, model: str, lines: list[bytes]) -> tuple[float, dict[str, str]]:
    """Seconds of the whole process, and what became of the healthy rows."""
    source, output = folder / "in.jsonl", folder / "out.jsonl"
    source.write_bytes(b"\n".join(lines) + b"\n")
    command = [
        sys.executable,
        "-c",
        "from pagedbatch.cli.app import main; main()",
        "run",
        str(source),
        "--model",
        model,
    ]
    began = time.perf_counter()
    options = ["--max-tokens", "16", "--kv-memory", "256MiB", "--restart", "--dtype", "float32", "-o", str(output)]
    ended = subprocess.run([*command, *options], check=False)
    seconds = time.perf_counter() - began
    found = {}
    with output.open(encoding="utf-8") as file:
        for record in map(json.loads, file):
            if str(record.get("id")).startswith("healthy"):
                del record["index"], record["usage"]["cached_tokens"]
                found[record["id"]] = json.dumps(record)
    print(f"exit {ended.returncode}, {len(lines)} rows", file=sys.stderr)
    return seconds, found


if __name__ == "__main__":
    main()

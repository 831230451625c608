"""`pagedbatch doctor`: what this machine can do, and whether a model can run on it. Loads no weights."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from pagedbatch.printable import printable

_PACKAGES = ("torch", "transformers", "triton", "datasets", "tokenizers", "safetensors", "zstandard", "gguf")


def doctor(
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", show_default=False, help="Also tell, from its config alone, if this model runs."),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the model's own configuration code.")
    ] = False,
) -> int:
    """Tell what this machine can do, and with --model whether that model can run here."""
    from rich.console import Console

    console = Console()
    _print(console, "this machine", _machine())
    if model is None:
        return 0
    from pagedbatch.model.facts import model_facts
    from pagedbatch.model.loader import load_config

    facts = model_facts(load_config(model, trust_remote_code=trust_remote_code))
    _print(console, f"model {model}", _model(facts))
    return 0 if facts.missing is None else 1


def _machine() -> Iterator[tuple[str, str]]:
    import psutil
    import torch

    from pagedbatch.model.backends import available_backends
    from pagedbatch.model.loader import has_fast_bfloat16

    yield "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield "packages", ", ".join(_versions())
    memory = psutil.virtual_memory()
    yield "memory", f"{memory.available / 2**30:.1f} GiB free of {memory.total / 2**30:.1f} GiB"
    capability = torch.backends.cpu.get_cpu_capability()
    bfloat16 = "fast bfloat16" if has_fast_bfloat16() else "no fast bfloat16: float32 is the default here"
    yield "cpu", f"{torch.get_num_threads()} threads, {capability}, {bfloat16}"
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            yield f"gpu {index}", f"{gpu.name}, {gpu.total_memory / 2**30:.1f} GiB, compute {gpu.major}.{gpu.minor}"
    else:
        yield "gpu", "none that torch can use: runs go to the CPU"
    yield "compiler", shutil.which("c++") or shutil.which("g++") or "none"
    yield "attention", ", ".join(available_backends())


def _versions() -> Iterator[str]:
    for name in _PACKAGES:
        if importlib.util.find_spec(name) is None:
            yield f"no {name}"
        else:
            yield f"{name} {importlib.metadata.version(name)}"


def _model(facts: Any) -> Iterator[tuple[str, str]]:
    import torch

    yield "type", facts.model_type
    yield "verdict", "runs here" if facts.missing is None else f"can't run here: {facts.missing}"
    heads = f"{facts.num_heads} heads, {facts.num_kv_heads} KV heads of size {facts.head_size}"
    yield "attention", f"{facts.num_layers} layers, {heads}"
    if facts.windows:
        yield "windows", ", ".join(f"{window} tokens in {count} layers" for window, count in facts.windows.items())
    if facts.softcap is not None:
        yield "soft cap", f"{facts.softcap:g}"
    if facts.has_sinks:
        yield "sinks", "a learned one a head"
    yield "limit", f"{facts.max_model_len} tokens a sequence, vocabulary of {facts.vocab_size}"
    sizes = [f"{facts.token_bytes(dtype):,} bytes in {str(dtype)[6:]}" for dtype in (torch.bfloat16, torch.float32)]
    yield "KV a token", ", ".join(sizes)


def _print(console: Any, title: str, rows: Iterator[tuple[str, str]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for name, value in rows:
        table.add_row(Text(f"  {name}"), Text(printable(value)))
    console.print(Text(printable(title), style="bold"))
    console.print(table)

"""`pagedbatch doctor`: what this machine can do, and whether a model can run on it. No weights are loaded."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagedbatch.errors import ExitCode
from pagedbatch.printable import printable

if TYPE_CHECKING:
    from pagedbatch.model.inspection import Inspection
    from pagedbatch.model.model_config import ModelConfig

_PACKAGES = ("torch", "transformers", "triton", "datasets", "tokenizers", "safetensors", "zstandard", "gguf")


def doctor(
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", metavar="TEXT", help="Say, from its files, whether this model can run here."),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run configuration code from the model's repository.")
    ] = False,
) -> int:
    """Show what this machine can do and, with --model, whether that model can run on it."""
    from rich.console import Console

    from pagedbatch.input.hub import go_offline_if_needed

    if model is not None:
        go_offline_if_needed(model)
    console = Console()
    _print(console, "this machine", _machine())
    if model is None:
        return 0
    from pagedbatch.model.inspection import inspect_model

    found = inspect_model(model, trust_remote_code=trust_remote_code)
    _print(console, f"model {model}", _model(found))
    return ExitCode.FAILED if found.problems else ExitCode.OK


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
        yield "gpu", "none that torch can use: models run on the CPU"
    yield "compiler", shutil.which("c++") or shutil.which("g++") or "none"
    yield "attention", ", ".join(available_backends())


def _versions() -> Iterator[str]:
    for name in _PACKAGES:
        if importlib.util.find_spec(name) is None:
            yield f"no {name}"
        else:
            yield f"{name} {importlib.metadata.version(name)}"


def _model(found: Inspection) -> Iterator[tuple[str, str]]:
    yield "type", found.model_type
    if found.problems:
        yield "verdict", f"can't run here: {found.problems[0]}"
    else:
        yield (
            "verdict",
            "runs here" if found.weights else "would run here, by its config; there are no weights to check",
        )
    for problem in found.problems[1:]:
        yield "also", problem
    if found.quantisation is not None:
        yield "quantised", found.quantisation
    if found.weights is not None:
        yield "weights", found.weights
    if found.config is not None:
        yield from _config(found.config)


def _config(config: ModelConfig) -> Iterator[tuple[str, str]]:
    import torch

    heads = f"{config.num_heads} heads, {config.num_kv_heads} KV heads of size {config.head_size}"
    yield "attention", f"{config.num_layers} layers, {heads}"
    windows = Counter(window for window in config.sliding_windows if window is not None)
    if windows:
        yield "windows", ", ".join(f"{window} tokens in {count} layers" for window, count in sorted(windows.items()))
    if config.softcap is not None:
        yield "soft cap", f"{config.softcap:g}"
    if config.has_sinks:
        yield "sinks", "one per head, learned"
    note = "" if config.context.why is None else f" ({config.context.why})"
    yield "limit", f"{config.context.tokens} tokens per sequence{note}, vocabulary of {config.vocab_size}"
    sizes = [f"{config.token_bytes(dtype):,} bytes in {str(dtype)[6:]}" for dtype in (torch.bfloat16, torch.float32)]
    yield "KV per token", ", ".join(sizes)


def _print(console: Any, title: str, rows: Iterator[tuple[str, str]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for name, value in rows:
        table.add_row(Text(f"  {name}"), Text(printable(value)))
    console.print(Text(printable(title), style="bold"))
    console.print(table)

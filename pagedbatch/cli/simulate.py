"""`pagedbatch simulate`: the real scheduler and pool on a trace of lengths, without a model's weights."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from pagedbatch.cli.flags import takes_options
from pagedbatch.cli.terminal import say
from pagedbatch.errors import UsageError
from pagedbatch.options import Option
from pagedbatch.printable import printable_values
from pagedbatch.settings import OPTIONS, read_setting

_requests = partial(typer.Option, rich_help_panel="Requests")
_model = partial(typer.Option, rich_help_panel="Model and device")


def _like_run(name: str, default_text: str = "", help: str = "") -> Option:
    shared = OPTIONS[name]
    return replace(shared, default_text=default_text or shared.default_text, help=help or shared.help)


_OPTIONS = [
    _like_run("max_model_len", "the model's context, else 2048"),
    _like_run("num_blocks", "enough for --max-num-seqs sequences of the full context"),
    _like_run("kv_memory", "as --num-blocks says", "Size of the KV pool, such as 4GiB. Needs --model or its shape."),
    _like_run("block_size"),
    _like_run("max_num_seqs"),
    _like_run("max_num_batched_tokens"),
    _like_run("preemption"),
]


@takes_options(_OPTIONS)
def simulate(
    context: typer.Context,
    trace: Annotated[
        str | None,
        typer.Argument(
            metavar="TRACE",
            rich_help_panel="Requests",
            help="CSV, JSONL or Parquet file with a column of prompt lengths and one of output lengths.",
        ),
    ] = None,
    input_column: Annotated[
        str | None,
        _requests(metavar="NAME", help="Column of prompt lengths. (default: the name that a known trace uses)"),
    ] = None,
    output_column: Annotated[
        str | None,
        _requests(
            metavar="NAME",
            help="Column of output lengths, or of lists with a length for each sample. (default: as above)",
        ),
    ] = None,
    prefix_column: Annotated[
        str | None, _requests(metavar="NAME", help="Requests with the same value in this column begin alike.")
    ] = None,
    prefix_length: Annotated[
        str | None,
        _requests(
            metavar="COLUMN|TOKENS",
            help="How many tokens those have in common. Without --prefix-column all requests have them in common.",
        ),
    ] = None,
    log_normal: Annotated[
        str | None,
        _requests(
            metavar="IN,OUT,SIGMA",
            help="Draw log-normal lengths instead of reading a trace: mean prompt length, mean output length, spread.",
        ),
    ] = None,
    limit: Annotated[
        int | None, _requests(min=1, metavar="N", help="Number of requests. (default: all; of drawn ones 1,000)")
    ] = None,
    n: Annotated[
        int | None,
        _requests("--n", "-n", min=1, metavar="N", help="Samples per request. (default: 1, or the list's lengths)"),
    ] = None,
    num_beams: Annotated[int, _requests(min=1, metavar="N", help="Beams per request, all as long as its output.")] = 1,
    sample_lengths: Annotated[
        str,
        _requests(
            metavar="request|independent",
            help="request: all samples are as long as the request's output. independent: exponential with that mean.",
        ),
    ] = "request",
    max_tokens: Annotated[
        int | None, _requests(min=1, metavar="N", help="Maximum tokens per output. (default: what the context leaves)")
    ] = None,
    seed: Annotated[int, _requests(metavar="INT", help="Seed of all that is drawn.")] = 0,
    model: Annotated[
        str | None,
        _model(
            "--model",
            "-m",
            metavar="TEXT",
            help="Take context and KV size from this model's config, without its weights.",
        ),
    ] = None,
    num_layers: Annotated[
        int | None, _model(min=1, metavar="N", help="Layers with keys and values, if there is no --model.")
    ] = None,
    num_kv_heads: Annotated[int | None, _model(min=1, metavar="N", help="KV heads, if there is no --model.")] = None,
    head_dim: Annotated[int | None, _model(min=1, metavar="N", help="Size of a head, if there is no --model.")] = None,
    dtype: Annotated[
        str, _model(metavar="float32|bfloat16|float16", help="Precision of keys and values.")
    ] = "bfloat16",
    num_swap_blocks: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", rich_help_panel="Memory and scheduling", help="Blocks of host memory for swapped rows."
        ),
    ] = 0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE.stats.json", help="Write the account to this file.")
    ] = None,
    **flags: Any,
) -> int:
    """Show what the pool would hold for a trace of lengths: the real scheduler and blocks, but no model computes."""
    from rich.console import Console

    from pagedbatch.cli.simulated_pool import KVShape, num_pool_blocks, pool_shape
    from pagedbatch.config import EngineConfig
    from pagedbatch.output.durable import write_atomically
    from pagedbatch.report.details import details
    from pagedbatch.report.summary import summary
    from pagedbatch.tools.simulate.lengths import parse_log_normal
    from pagedbatch.tools.simulate.simulate import simulate
    from pagedbatch.tools.simulate.stats import simulation_stats
    from pagedbatch.tools.simulate.trace import SampleLengths, script_trace
    from pagedbatch.tools.simulate.trace_file import TraceColumns, read_trace
    from pagedbatch.wording import plural

    if (trace is None) == (log_normal is None):
        raise UsageError("give a trace, or --log-normal IN,OUT,SIGMA")
    if num_beams > 1 and (n is not None or sample_lengths == "independent"):
        raise UsageError("--num-beams makes all beams of a search of one length: leave --n and --sample-lengths out")
    if sample_lengths not in ("request", "independent"):
        raise UsageError(f"--sample-lengths: {sample_lengths!r} is neither request nor independent")
    if output is not None and not output.parent.is_dir():
        raise UsageError(f"--output: there is no folder {output.parent}")
    columns = TraceColumns(input_column, output_column, prefix_column, prefix_length)
    if log_normal is not None and columns != TraceColumns():
        raise UsageError("--log-normal draws what columns would say: leave them and --prefix-length out")
    engine = {
        each.name: each.default if flags[each.name] is None else read_setting(each.name, flags[each.name])
        for each in _OPTIONS
    }
    shape = pool_shape(model, KVShape(num_layers, num_kv_heads, head_dim), dtype, engine["max_model_len"])
    block_size = engine["block_size"]
    blocks = num_pool_blocks(shape, engine["num_blocks"], engine["kv_memory"], engine["max_num_seqs"], block_size)
    config = EngineConfig(
        num_blocks=blocks,
        block_size=block_size,
        num_swap_blocks=num_swap_blocks,
        max_num_seqs=engine["max_num_seqs"],
        max_num_batched_tokens=engine["max_num_batched_tokens"],
        max_model_len=shape.max_model_len,
        preemption=engine["preemption"],
        prefix_cache=prefix_length is not None,
    )
    requests = (
        islice(parse_log_normal(log_normal, seed), limit or 1000)
        if log_normal is not None
        else read_trace(str(trace), columns, limit)
    )
    scripted = script_trace(
        requests,
        config.max_model_len,
        samples=SampleLengths(n, sample_lengths == "independent"),
        num_beams=num_beams,
        max_tokens=max_tokens,
        seed=seed,
    )
    found = simulate(scripted, config, block_bytes=shape.token_bytes * block_size, seed=seed)
    used = {"num_blocks": blocks, "max_model_len": config.max_model_len}
    stats = simulation_stats(found, _settings(context, context.params | engine, used))
    if output is not None:
        write_atomically(output, [json.dumps(stats).encode(), b"\n"])
    console = Console()
    shown = printable_values(stats)
    summary(shown, console)
    details(shown, console)
    if found.num_cut:
        cut = plural(found.num_cut, "request was", "requests were")
        say(f"{cut} cut to the context of {config.max_model_len} tokens")
    if found.num_lifted:
        say(f"{plural(found.num_lifted, 'request')} had a length of 0: it was taken as 1")
    if found.num_error:
        say(f"{found.num_error} requests could not run; the first: {found.first_error}")
    return 3 if found.num_error else 0


def _settings(context: typer.Context, values: dict[str, Any], used: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Each setting's value and source, and what those came to that were left open."""
    settings: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        source = context.get_parameter_source(name)
        given = source is not None and source.name == "COMMANDLINE"
        settings[name] = {
            "value": str(value) if isinstance(value, Path) else value,
            "source": "command line" if given else "default",
        }
        if name in used:
            settings[name]["used"] = used[name]
    return settings

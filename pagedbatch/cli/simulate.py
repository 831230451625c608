"""`pagedbatch simulate`: the real scheduler and pool on a trace of lengths. Knows no model but its config."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from pagedbatch.cli.terminal import say
from pagedbatch.errors import UsageError
from pagedbatch.printable import printable_values
from pagedbatch.stats.schema import Setting

_REQUESTS = "Requests"
_ENGINE = "Engine, as in `run`"


def simulate(
    context: typer.Context,
    trace: Annotated[
        str | None,
        typer.Argument(show_default=False, help="CSV, JSONL or Parquet with a column for each length."),
    ] = None,
    input_column: Annotated[
        str | None,
        typer.Option(rich_help_panel=_REQUESTS, help="Column of prompt lengths. (default: a well-known name)"),
    ] = None,
    output_column: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_REQUESTS,
            help="Column of output lengths; a list has one for each sample. (default: a well-known name)",
        ),
    ] = None,
    prefix_column: Annotated[
        str | None, typer.Option(rich_help_panel=_REQUESTS, help="Rows with the same value here begin alike.")
    ] = None,
    prefix_length: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN|TOKENS",
            rich_help_panel=_REQUESTS,
            help="How many tokens those have in common; without --prefix-column, all rows.",
        ),
    ] = None,
    log_normal: Annotated[
        str | None,
        typer.Option(
            metavar="IN,OUT,SIGMA",
            rich_help_panel=_REQUESTS,
            help="Instead of a trace: log-normal lengths, their means.",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, rich_help_panel=_REQUESTS, help="So many requests. (default: all; 1,000 drawn)")
    ] = None,
    n: Annotated[
        int | None,
        typer.Option(
            "--n", "-n", min=1, rich_help_panel=_REQUESTS, help="Samples a request. (default: 1, or the list's)"
        ),
    ] = None,
    num_beams: Annotated[
        int,
        typer.Option(min=1, rich_help_panel=_REQUESTS, help="Beam searches of this width, as long as the outputs."),
    ] = 1,
    sample_lengths: Annotated[
        str,
        typer.Option(
            rich_help_panel=_REQUESTS,
            help="request: every sample ends at its request's length; independent: exponential, of that mean.",
        ),
    ] = "request",
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, rich_help_panel=_REQUESTS, help="Limit of every output. (default: what the context leaves)"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(rich_help_panel=_REQUESTS, help="Of everything drawn.")] = 0,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", rich_help_panel=_ENGINE, help="Its config gives bytes and context; no weights."),
    ] = None,
    num_layers: Annotated[
        int | None, typer.Option(min=1, rich_help_panel=_ENGINE, help="Layers with K and V, where there is no --model.")
    ] = None,
    num_kv_heads: Annotated[
        int | None, typer.Option(min=1, rich_help_panel=_ENGINE, help="Heads of K and V, where there is no --model.")
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option(min=1, rich_help_panel=_ENGINE, help="Numbers a head, where there is no --model.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=2, rich_help_panel=_ENGINE, help="Context. (default: the model's, else 2048)")
    ] = None,
    block_size: Annotated[int, typer.Option(min=1, rich_help_panel=_ENGINE, help="Token slots a block.")] = 16,
    num_blocks: Annotated[
        int | None, typer.Option(min=1, rich_help_panel=_ENGINE, help="Pool size. (default: enough for all at once)")
    ] = None,
    kv_memory: Annotated[
        str | None, typer.Option(rich_help_panel=_ENGINE, help="Pool size: 4GiB; needs the model or its shape.")
    ] = None,
    dtype: Annotated[str, typer.Option(rich_help_panel=_ENGINE, help="Of K and V.")] = "bfloat16",
    max_num_seqs: Annotated[int, typer.Option(min=1, rich_help_panel=_ENGINE, help="Most sequences at once.")] = 128,
    max_num_batched_tokens: Annotated[
        int, typer.Option(min=1, rich_help_panel=_ENGINE, help="Most tokens a step.")
    ] = 2048,
    preemption: Annotated[str, typer.Option(rich_help_panel=_ENGINE, help="auto, swap or recompute.")] = "auto",
    num_swap_blocks: Annotated[
        int, typer.Option(min=0, rich_help_panel=_ENGINE, help="Blocks of host memory for swapped groups.")
    ] = 0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE.stats.json", help="Write the account here.")
    ] = None,
) -> int:
    """Show what the pool would hold for a trace of lengths: the real scheduler and blocks, and nothing computed."""
    from rich.console import Console

    from pagedbatch.cli.simulated_pool import KVShape, num_pool_blocks, pool_shape
    from pagedbatch.config import EngineConfig
    from pagedbatch.output.stats_file import write_stats
    from pagedbatch.report.details import details
    from pagedbatch.report.summary import summary
    from pagedbatch.tools.simulate.simulate import simulate, simulation_stats
    from pagedbatch.tools.simulate.trace import SampleLengths, parse_log_normal, script_trace
    from pagedbatch.tools.simulate.trace_file import TraceColumns, read_trace
    from pagedbatch.wording import plural

    if (trace is None) == (log_normal is None):
        raise UsageError("give a trace, or --log-normal IN,OUT,SIGMA")
    if num_beams > 1 and (n is not None or sample_lengths == "independent"):
        raise UsageError("--num-beams makes all beams of a search of one length: leave --n and --sample-lengths out")
    if sample_lengths not in ("request", "independent"):
        raise UsageError(f"--sample-lengths: {sample_lengths!r} is neither request nor independent")
    if preemption not in ("auto", "swap", "recompute"):
        raise UsageError(f"--preemption: {preemption!r} is none of auto, swap, recompute")
    if output is not None and not output.parent.is_dir():
        raise UsageError(f"--output: there is no folder {output.parent}")
    columns = TraceColumns(input_column, output_column, prefix_column, prefix_length)
    if log_normal is not None and columns != TraceColumns():
        raise UsageError("--log-normal draws what columns would say: leave them and --prefix-length out")
    shape = pool_shape(model, KVShape(num_layers, num_kv_heads, head_dim), dtype, max_model_len)
    blocks = num_pool_blocks(shape, num_blocks, kv_memory, max_num_seqs, block_size)
    config = EngineConfig(
        num_blocks=blocks,
        block_size=block_size,
        num_swap_blocks=num_swap_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=shape.max_model_len,
        preemption=preemption,  # type: ignore[arg-type]
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
    stats = simulation_stats(found, _settings(context, {"num_blocks": blocks, "max_model_len": config.max_model_len}))
    if output is not None:
        write_stats(output, stats)
    console = Console()
    shown = printable_values(stats)
    summary(shown, console)
    details(shown, console)
    if found.num_cut:
        cut = plural(found.num_cut, "request was", "requests were")
        say(f"{cut} cut to the context of {config.max_model_len} tokens")
    if found.num_clamped:
        say(f"{plural(found.num_clamped, 'request')} had a length of 0: it was taken as 1")
    if found.num_error:
        say(f"{found.num_error} requests could not run; the first: {found.first_error}")
    return 3 if found.num_error else 0


def _settings(context: typer.Context, used: dict[str, Any]) -> dict[str, Setting]:
    """Each setting's value and source, and what those stood for that were left open."""
    settings = {}
    for name, value in context.params.items():
        source = context.get_parameter_source(name)
        given = source is not None and source.name == "COMMANDLINE"
        settings[name] = Setting(
            value=str(value) if isinstance(value, Path) else value,
            source="command line" if given else "default",
            used=used.get(name),
        )
    return settings

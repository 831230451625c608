"""`pagedbatch simulate`: the real scheduler and pool on a trace of lengths, without a model's weights."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedbatch.cli.flags import takes_options, values_of
from pagedbatch.cli.terminal import say
from pagedbatch.config import EngineConfig, PreemptionMode
from pagedbatch.errors import ExitCode, UsageError
from pagedbatch.options import like, option, options_of
from pagedbatch.printable import printable_values
from pagedbatch.readers import INT64, choice, count, integer, new_file, text
from pagedbatch.settings import OPTIONS

if TYPE_CHECKING:
    from pagedbatch.stats.schema import Setting

_requests = partial(option, group="Requests")
_model = partial(option, group="Model and device")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """What `simulate` is told."""

    trace: str | None = _requests(
        None,
        text,
        "CSV, JSONL or Parquet file with a column of prompt lengths and one of output lengths.",
        is_argument=True,
    )
    input_column: str | None = _requests(
        None, text, "Column of prompt lengths.", metavar="NAME", default_text="the name that a known trace uses"
    )
    output_column: str | None = _requests(
        None,
        text,
        "Column of output lengths, or of lists with a length for each sample.",
        metavar="NAME",
        default_text="the name that a known trace uses",
    )
    prefix_column: str | None = _requests(
        None, text, "Requests with the same value in this column begin alike.", metavar="NAME"
    )
    prefix_length: str | None = _requests(
        None,
        text,
        "How many tokens those have in common. Without --prefix-column all requests have them in common.",
        metavar="COLUMN|TOKENS",
    )
    log_normal: str | None = _requests(
        None,
        text,
        "Draw log-normal lengths instead of reading a trace: mean prompt length, mean output length, spread.",
        metavar="IN,OUT,SIGMA",
    )
    limit: int | None = _requests(None, count, "Number of requests.", default_text="all; of drawn ones 1,000")
    n: int | None = _requests(
        None, count, "Samples per request.", short="-n", default_text="1, or as many as the list has lengths"
    )
    num_beams: int = _requests(1, count, "Beams per request, all as long as its output.")
    sample_lengths: str = _requests(
        "request",
        choice("request", "independent"),
        "request: all samples are as long as the request's output. independent: exponential with that mean.",
    )
    max_tokens: int | None = _requests(
        None, count, "Maximum tokens per output.", default_text="what the context leaves"
    )
    seed: int = _requests(0, integer(-INT64, INT64), "Seed of all that is drawn.")
    model: str | None = _model(
        None, text, "Take context and KV size from this model's config, without its weights.", short="-m"
    )
    num_layers: int | None = _model(None, count, "Layers with keys and values, if there is no --model.")
    num_kv_heads: int | None = _model(None, count, "KV heads, if there is no --model.")
    head_dim: int | None = _model(None, count, "Size of a head, if there is no --model.")
    dtype: str = _model("bfloat16", choice("float32", "bfloat16", "float16"), "Precision of keys and values.")
    max_model_len: int | None = like(OPTIONS["max_model_len"], default_text="the model's context, else 2048")
    num_blocks: int | None = like(
        OPTIONS["num_blocks"], default_text="enough for --max-num-seqs sequences of the full context"
    )
    kv_memory: int | None = like(
        OPTIONS["kv_memory"],
        help="Size of the KV pool, such as 4GiB. Needs --model or its shape.",
        default_text="as --num-blocks says",
    )
    block_size: int = like(OPTIONS["block_size"])
    max_num_seqs: int = like(OPTIONS["max_num_seqs"])
    max_num_batched_tokens: int = like(OPTIONS["max_num_batched_tokens"])
    preemption: PreemptionMode = like(OPTIONS["preemption"])  # noqa: RUF009 (a field, as all of these)
    num_swap_blocks: int = option(
        0, integer(0, INT64), "Blocks of host memory for swapped rows.", group="Memory and scheduling"
    )
    output: str | None = option(
        None, new_file, "Write the account to this file.", group="Output", short="-o", metavar="FILE.stats.json"
    )


_OPTIONS = options_of(SimulateOptions)


@takes_options(*_OPTIONS.values())
def simulate(**flags: Any) -> int:
    """Show what the pool would hold for a trace of lengths: the real scheduler and blocks, but no model computes."""
    from rich.console import Console

    from pagedbatch.cli.simulated_pool import KVShape, num_pool_blocks, pool_shape
    from pagedbatch.output.stats_file import write_stats
    from pagedbatch.report.details import details
    from pagedbatch.report.summary import summary
    from pagedbatch.tools.simulate.simulate import simulate, simulation_stats
    from pagedbatch.tools.simulate.trace import SampleLengths, parse_log_normal, script_trace
    from pagedbatch.tools.simulate.trace_file import TraceColumns, read_trace
    from pagedbatch.wording import plural

    own = SimulateOptions(**values_of(_OPTIONS, flags))
    if (own.trace is None) == (own.log_normal is None):
        raise UsageError("give a trace, or --log-normal IN,OUT,SIGMA")
    independent = own.sample_lengths == "independent"
    if own.num_beams > 1 and (own.n is not None or independent):
        raise UsageError("--num-beams makes all beams of a search of one length: leave --n and --sample-lengths out")
    columns = TraceColumns(own.input_column, own.output_column, own.prefix_column, own.prefix_length)
    if own.log_normal is not None and columns != TraceColumns():
        raise UsageError("--log-normal draws what columns would say: leave them and --prefix-length out")
    kv_shape = KVShape(own.num_layers, own.num_kv_heads, own.head_dim)
    shape = pool_shape(own.model, kv_shape, own.dtype, own.max_model_len)
    config = EngineConfig(
        num_blocks=num_pool_blocks(shape, own.num_blocks, own.kv_memory, own.max_num_seqs, own.block_size),
        block_size=own.block_size,
        num_swap_blocks=own.num_swap_blocks,
        max_num_seqs=own.max_num_seqs,
        max_num_batched_tokens=own.max_num_batched_tokens,
        max_model_len=shape.max_model_len,
        preemption=own.preemption,
        prefix_cache=own.prefix_length is not None,
    )
    requests = (
        islice(parse_log_normal(own.log_normal, own.seed), own.limit or 1000)
        if own.log_normal is not None
        else read_trace(str(own.trace), columns, own.limit)
    )
    scripted = script_trace(
        requests,
        config.max_model_len,
        samples=SampleLengths(own.n, independent),
        num_beams=own.num_beams,
        max_tokens=own.max_tokens,
        seed=own.seed,
    )
    found = simulate(scripted, config, block_bytes=shape.token_bytes * own.block_size, seed=own.seed)
    stats = simulation_stats(found, _settings(own, flags, config))
    if own.output is not None:
        write_stats(Path(own.output), stats)
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
    return ExitCode.ROW_ERRORS if found.num_error else ExitCode.OK


def _settings(own: SimulateOptions, flags: dict[str, Any], config: EngineConfig) -> dict[str, Setting]:
    """Each setting's value and source, and what those stood for that were left open."""
    from pagedbatch.stats.schema import Setting

    used = {"num_blocks": config.num_blocks, "max_model_len": config.max_model_len}
    settings = {}
    for name, value in asdict(own).items():
        source = "default" if flags[name] is None else "command line"
        settings[name] = Setting(value=value, source=source, used=used.get(name))
    return settings

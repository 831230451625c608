"""A plan as terminal tables of at most 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, fields

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from pagedbatch.printable import printable
from pagedbatch.tools.plan.forecast import Forecast
from pagedbatch.tools.plan.plan import Forecasts, Plan
from pagedbatch.tools.plan.rows import PlannedRows, PromptLengths
from pagedbatch.tools.plan.sizes import Sizes
from pagedbatch.tools.plan.verdict import Scheme
from pagedbatch.wording import percent, plural, size

_POOL_FROM = {"num_blocks": "--num-blocks", "kv_memory": "--kv-memory"}
_UNKNOWN = "output lengths are unknown: give the expected mean with --expect-tokens N"


def print_plan(plan: Plan, console: Console) -> None:
    """Rows, memory, the simulated run, block sizes, contiguous schemes, and the verdict last."""
    _title(console, "Rows", _count(plan.rows))
    if plan.rows.prompts is not None:
        console.print(_prompts(plan.rows.prompts))
    for reason in plan.rows.refused:
        console.print(Padding(Text(printable(reason), style="red"), (0, 0, 0, 2)))
    if plan.rows.num_refused > len(plan.rows.refused):
        console.print(Text(f"  and {plan.rows.num_refused - len(plan.rows.refused):,} more"))
    _title(console, "Memory", f"{plan.sizes.dtype} on {plan.sizes.device}")
    console.print(_memory(plan))
    if plan.forecasts is None:
        console.print(Text("\nno row can run: there is nothing to simulate", style="bold"))
        return
    _print_forecasts(plan, plan.forecasts, console)


def _print_forecasts(plan: Plan, forecasts: Forecasts, console: Console) -> None:
    first = len(plan.rows.first)
    of_all = "" if first == plan.rows.num_ok else f"from the first {plural(first, 'row')}"
    _title(console, "The run, simulated", of_all)
    console.print(_by_length(forecasts.by_length))
    if len(forecasts.by_length) > 1:
        console.print(Text(f"  {_UNKNOWN}", style="dim"))
    _title(console, "Block sizes", f"outputs: {forecasts.likely.outputs}; unlimited memory")
    console.print(_block_sizes(forecasts.by_block_size, forecasts.advice.block_size, plan.sizes.token_bytes))
    _title(console, "The same memory, paged and contiguous", f"outputs: {forecasts.likely.outputs}")
    console.print(_schemes(forecasts.verdict.schemes, plan.sizes.token_bytes))
    console.print()
    verdict = forecasts.verdict
    console.print(Text.assemble((verdict.headline, "bold"), f": {'; '.join(verdict.reasons)}."))
    console.print(_advice(forecasts, plan.sizes, "none of these rows" if of_all else "no row"))


def _title(console: Console, title: str, note: str) -> None:
    console.print()
    console.print(Text.assemble((title, "bold"), (f"  {note}" if note else "", "dim")))


def _table(*headers: str, first: str = "") -> Table:
    table = Table(box=None, padding=(0, 0, 0, 2), header_style="dim")
    table.add_column(first, no_wrap=True)
    for header in headers:
        table.add_column(header, justify="right")
    return table


def _count(rows: PlannedRows) -> str:
    parts = [f"{rows.num_rows:,}"]
    if rows.num_refused:
        parts.append(f"{rows.num_refused:,} can't run")
    if rows.num_truncated:
        parts.append(f"{plural(rows.num_truncated, 'prompt')} cut to fit")
    return ", ".join(parts)


def _prompts(prompts: PromptLengths) -> Table:
    names = [field.name for field in fields(prompts)][1:]
    table = _table(*names)
    table.add_row("prompt tokens", *(f"{value:,.0f}" for value in astuple(prompts)[1:]))
    return table


def _memory(plan: Plan) -> Table:
    sizes = plan.sizes
    origin = next((flag for name, flag in _POOL_FROM.items() if plan.settings[name].value is not None), None)
    pool = f"{plural(sizes.num_blocks, 'block')}, {size(sizes.pool_bytes)}"
    pool += f", by {origin}" if origin else f", of {size(sizes.free_bytes)} free here"
    table = Table(box=None, padding=(0, 0, 0, 2), show_header=False)
    table.add_row("weights", f"{size(sizes.weight_bytes)}, {sizes.num_parameters:,} parameters")
    block = f"{size(sizes.block_bytes)} per block of {plural(sizes.block_size, 'token')}"
    table.add_row("K and V", f"{sizes.token_bytes:,} bytes per token, {block}")
    table.add_row("pool", pool)
    if not sizes.fits:
        short = f"weights and pool do not fit into the {size(sizes.free_bytes)} that are free on {sizes.device}"
        table.add_row("", Text(short, style="red"))
    return table


def _by_length(forecasts: Sequence[Forecast]) -> Table:
    """A column for each assumption, a line for each figure."""
    table = _table(*(each.outputs for each in forecasts), first="outputs")
    table.add_row("tokens per output", *(f"{each.mean_output_tokens:,.0f}" for each in forecasts))
    table.add_row("rows at once", *(f"{each.mean_running_rows:,.1f}" for each in forecasts))
    table.add_row("  at most", *(f"{each.peak_running_rows:,}" for each in forecasts))
    table.add_row("sequences at once", *(f"{each.mean_running_sequences:,.1f}" for each in forecasts))
    table.add_row("  at most", *(f"{each.peak_running_sequences:,}" for each in forecasts))
    table.add_row("blocks at peak", *(f"{each.peak_live_blocks:,}" for each in forecasts))
    table.add_row("  of the pool", *(percent(each.peak_live_blocks / each.num_blocks) for each in forecasts))
    table.add_row("sharing saves", *(percent(each.sharing_saving) for each in forecasts))
    table.add_row("prefixes found", *(percent(each.prefix_hits) for each in forecasts))
    table.add_row("KV that holds tokens", *(percent(each.kv_used) for each in forecasts))
    table.add_row("preemptions", *(f"{each.preemptions:,}" for each in forecasts))
    return table


def _block_sizes(by_size: Sequence[Forecast], advised: int, token_bytes: int) -> Table:
    table = _table("KV used", "sharing saves", "per sequence", "at peak", first="tokens per block")
    for each in by_size:
        style = "bold" if each.block_size == advised else ""
        table.add_row(
            f"{each.block_size}{'  advised' if each.block_size == advised else ''}",
            percent(each.kv_used),
            percent(each.sharing_saving),
            size(each.slots_per_sequence * token_bytes),
            size(each.peak_live_blocks * each.block_size * token_bytes),
            style=style,
        )
    return table


def _schemes(schemes: Sequence[Scheme], token_bytes: int) -> Table:
    table = _table("KV used", "per sequence", "at once", "would fit")
    for each in schemes:
        held = "-" if each.slots_a_sequence is None else size(each.slots_a_sequence * token_bytes)
        name = each.name if each is schemes[0] else f"contiguous {each.name}"
        table.add_row(name, percent(each.used), held, f"{each.at_once:,.1f}", f"{each.fit:,.0f}")
    return table


def _advice(forecasts: Forecasts, sizes: Sizes, nobody: str) -> Text:
    advice = forecasts.advice
    words = f"--block-size {advice.block_size} --kv-memory {advice.kv_memory}"
    if advice.kv_bytes <= sizes.usable_bytes:
        return Text.assemble((words, "bold"), f": enough that {nobody} waits for memory, however long the outputs are.")
    return Text.assemble(
        (f"--block-size {advice.block_size}", "bold"),
        f": that {nobody} waits for memory, the pool would have to be {advice.kv_memory}; a run takes at most ",
        f"{size(sizes.usable_bytes)} here by default.",
    )

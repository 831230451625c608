"""The settings of a run: its options, and how command line, recipe and defaults are merged.

Options that a row may also give are those of `params`.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pagedbatch.config import PreemptionMode
from pagedbatch.errors import ParamError, UsageError
from pagedbatch.options import GROUPS, Option, option, options_of
from pagedbatch.params import GENERATION_OPTIONS, resolve
from pagedbatch.readers import (
    MAX_TOKEN_ID,
    Reader,
    boolean,
    choice,
    column_names,
    count,
    day,
    delimiter,
    escaped_text,
    integer,
    json_object,
    number,
    size,
    text,
    text_or_object,
)
from pagedbatch.shard import Shard

Origin = Literal["command line", "recipe", "model", "default"]

_job = partial(option, group="Job")
_input = partial(option, group="Input")
_output = partial(option, group="Output")
_prompts = partial(option, group="Prompts")
_constraints = partial(option, group="Constraints")
_memory = partial(option, group="Memory and scheduling")
_model = partial(option, group="Model and device")
_workers = partial(option, group="Workers")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """The checked settings of a run. Sizes are in bytes.

    `generation` holds the generation options that were given for the whole run. `origins` says where each setting that
    is not at its default came from. `started` is the time at which the run first started, in ISO format; it is known
    once the journal has been read.
    """

    input: str = _job(
        MISSING,
        text,
        "The rows: JSON Lines, a JSON array, CSV, TSV, a text file with one prompt per line (all also .gz or .zst), "
        "Parquet, - for stdin, a folder, or the name of a dataset on the Hub.",
        is_argument=True,
    )
    model: str = _job(MISSING, text, "Hub id, folder or .gguf file.", short="-m")
    output: str = _job(
        MISSING,
        text,
        "Where the records go, in input order: Parquet if the name ends in .parquet, else JSON Lines; - for stdout.",
        short="-o",
        metavar="FILE",
    )

    limit: int | None = _input(None, count, "Run only the first N rows.", metavar="N")
    shard: str | None = _input(
        None,
        Reader(lambda _, value: str(Shard.parse(value)), "I/N", "I/N, with I from 0 to N - 1"),
        "Run only slice I of N of the rows, counted from 0, after --limit. `pagedbatch merge` joins the outputs.",
    )
    split: str | None = _input(None, text, "Split of a dataset.", in_manifest="always")
    subset: str | None = _input(None, text, "Subset of a dataset on the Hub.", in_manifest="always")
    streaming: bool = _input(
        False, boolean, "Read a Hub dataset without downloading it first. With --limit only as much as is needed."
    )
    csv_delimiter: str | None = _input(
        None, delimiter, "What separates the columns of a CSV file.", default_text="comma; tab for .tsv"
    )
    ignore_columns: tuple[str, ...] = _input(
        (),
        column_names,
        "Columns that are data even if their names are those of options: A,B, or the flag repeated.",
        in_manifest="if set",
    )
    allow_duplicate_ids: bool = _input(False, boolean, "Allow several rows with one id.")
    strict: bool = _input(
        False, boolean, "List all rows that can't be answered and stop before the weights are loaded, if there are any."
    )
    max_line_bytes: int = _input(64 * 2**20, size(1), "A longer line is an error row.", in_manifest="always")
    row_prepare_timeout: float = _input(
        5.0,
        number(0, 86_400, above_low=True, metavar="SECONDS"),
        "CPU seconds that one row's chat template, tokens and schema may take. A row that takes longer is an error.",
    )
    served_model_name: str | None = _input(
        None,
        text,
        "The name by which OpenAI batch rows ask for the model. Rows with another one are errors.",
        default_text="the value of --model, or the name of its folder",
        in_manifest="always",
    )

    keep: tuple[str, ...] = _output(
        (),
        column_names,
        "Columns to copy into the records: A,B.C, or the flag repeated; * for all.",
        in_manifest="always",
    )
    retry_errors: bool = _output(False, boolean, "Run the error rows of an earlier run again.")
    restart: bool = _output(False, boolean, "Start from the beginning, even if an earlier run could be resumed.")

    prompt_column: str | None = _prompts(
        None, text, "Column that holds the prompt.", metavar="NAME", in_manifest="always"
    )
    prompt_template: str | None = _prompts(
        None,
        escaped_text,
        r"Make the prompt from columns: 'Question: {question}\nAnswer:'. \n and \t are understood.",
        in_manifest="always",
    )
    chat: bool = _prompts(False, boolean, "Put each prompt into the model's chat template.", in_manifest="always")
    chat_template_kwargs: Mapping[str, Any] | None = _prompts(
        None,
        json_object,
        "Variables for the chat template, such as '{\"enable_thinking\": false}'. Rows may add theirs.",
        row_key="chat_template_kwargs",
        in_manifest="always",
    )
    date: str | None = _prompts(
        None,
        day,
        "The date that the chat template writes as today's.",
        default_text="the day on which the run first started",
        in_manifest="always",
    )

    constrain_to: str | None = _constraints(
        None,
        text,
        "Each output is an item of this file. Each line is one: a text, or a JSON list of token ids.",
        row_key="allowed_outputs",
        metavar="FILE",
    )
    json_schema: str | Mapping[str, Any] | None = _constraints(
        None,
        text_or_object,
        "Each output is JSON of this schema: a file, or the JSON itself.",
        row_key="json_schema",
        metavar="FILE|JSON",
    )
    regex: str | None = _constraints(
        None, text, "Each output as a whole matches this regular expression.", row_key="regex", metavar="REGEX"
    )
    grammar: str | None = _constraints(
        None,
        text,
        "Each output matches the EBNF grammar in this file, whose first rule is named root.",
        row_key="grammar",
        metavar="FILE",
    )

    kv_memory: int | None = _memory(
        None, size(), "Size of the KV pool, such as 4GiB.", default_text="the free memory, less a margin"
    )
    num_blocks: int | None = _memory(None, count, "Size of the KV pool in blocks, instead of --kv-memory.")
    block_size: int = _memory(16, count, "Tokens per block. Multiples of 16 are fastest on a CPU.")
    max_num_seqs: int = _memory(
        128, count, "Maximum sequences that run at once. More samples of one row than this take turns; its beams can't."
    )
    max_num_batched_tokens: int = _memory(2048, count, "Maximum tokens per step.")
    prefix_cache: bool = _memory(True, boolean, "Reuse the blocks of prompts that begin alike.")
    preemption: PreemptionMode = _memory(  # noqa: RUF009 (a field, as all of these)
        "auto",
        choice("auto", "swap", "recompute"),
        "What happens to running rows when the pool is full. swap: their blocks are copied to host memory. recompute: "
        "they are computed again later. auto: swap for rows of several sequences, recompute for others.",
    )
    swap_space: int = _memory(2**30, size(), "Host memory for blocks that are swapped out.")

    max_model_len: int | None = _model(
        None,
        integer(2, MAX_TOKEN_ID),
        "Maximum tokens per sequence, prompt included.",
        default_text="as the model's config says",
        in_manifest="if set",
    )
    generation_config: str = _model(
        "auto",
        choice("auto", "none"),
        "auto: settings that nobody gives come from the model's generation config. none: only its end tokens do.",
        in_manifest="always",
    )
    device: str = _model("auto", choice("auto", "cpu", "cuda"), "Where the model runs. auto: on a GPU if there is one.")
    dtype: str = _model(
        "auto",
        choice("auto", "float32", "bfloat16", "float16"),
        "Precision of the weights and of the KV cache.",
        in_manifest="always",
    )
    attention: str = _model(
        "auto",
        choice("auto", "triton", "cpu", "torch"),
        "Attention kernels: triton for GPUs, cpu (C++) for CPUs, or torch, which runs everywhere and is slow.",
    )
    forward: Literal["auto", "hf"] = _model(
        "auto",
        choice("auto", "hf", plain="hf"),
        "auto: a faster forward pass where there is one for the model. hf: always that of transformers.",
    )
    trust_remote_code: bool = _model(False, boolean, "Run code from the model's repository.", in_manifest="always")
    ignore_adapter: bool = _model(
        False,
        boolean,
        "Use the model's own weights where an adapter lies beside them; otherwise such a model is refused.",
        in_manifest="if set",
    )

    workers: int | None = _workers(
        None,
        count,
        "Number of worker processes (one per GPU, or the CPUs split evenly); memory sizes apply per worker.",
        metavar="N",
        default_text="none: this process does the work; with --ray-address one per GPU, else one per machine",
    )
    ray_address: str | None = _workers(
        None, text, "Run the workers on a running Ray cluster: auto, or HOST:PORT.", metavar="ADDRESS"
    )

    generation: Mapping[str, Any]
    origins: Mapping[str, Origin]
    started: str | None = None

    @property
    def now(self) -> datetime:
        """The present for chat templates: `date`, else the first start of the run."""
        given = self.date or self.started
        return datetime.now() if given is None else datetime.fromisoformat(given)

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names by which OpenAI batch rows may ask for the model. The first one is written into their answers."""
        if self.served_model_name is not None:
            return (self.served_model_name,)
        return (self.model, Path(self.model).name)

    @property
    def uses_workers(self) -> bool:
        """Whether worker processes answer the rows, instead of this process."""
        return self.workers is not None or self.ray_address is not None

    def for_manifest(self) -> dict[str, Any]:
        """The settings that decide what is written, beside the generation options. The others only change the speed."""
        values = {name: getattr(self, name) for name, each in RUN_OPTIONS.items() if each.in_manifest != "no"}
        return {name: value for name, value in values.items() if value or RUN_OPTIONS[name].in_manifest == "always"}

    def origin(self, name: str) -> Origin:
        return self.origins.get(name, "default")


RUN_OPTIONS = options_of(RunSettings)
#: The table of all options of a run, in the order of the help. Their names are also the keys of recipes.
OPTIONS: dict[str, Option] = {
    each.name: each
    for each in sorted([*RUN_OPTIONS.values(), *GENERATION_OPTIONS.values()], key=lambda each: GROUPS.index(each.group))
}

#: Settings of which only one can be given.
_EITHER_OR = (
    ("kv_memory", "num_blocks"),
    ("prompt_column", "prompt_template"),
    ("constrain_to", "json_schema", "regex", "grammar"),
)


def read_recipe(path: str) -> dict[str, Any]:
    """The settings of a TOML recipe, by their names with underscores.

    Raises:
        UsageError: it is missing or malformed, or contains an unknown key.
    """
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"--recipe {path}: no such file") from None
    except OSError as error:
        raise UsageError(f"--recipe {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"--recipe {path}: not UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"--recipe {path}: malformed TOML: {error}") from None
    settings: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in OPTIONS:
            close = difflib.get_close_matches(name, sorted(OPTIONS), n=1)
            hint = f": did you mean {close[0]!r}?" if close else ""
            raise UsageError(f"--recipe {path}: unknown key {key!r}{hint}")
        if name in settings:
            raise UsageError(f"--recipe {path}: {name} is given twice, with a dash and with an underscore")
        settings[name] = value
    return settings


def merge(command_line: Mapping[str, Any], recipe: Mapping[str, Any]) -> RunSettings:
    """Merges the settings of both layers over the defaults; the command line wins. `None` means "not given here".

    Raises:
        UsageError: a value is wrong, one is missing, or two can't be combined.
    """
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    layers: tuple[tuple[Origin, Mapping[str, Any]], ...] = (("recipe", recipe), ("command line", command_line))
    for origin, layer in layers:
        given = {name: value for name, value in layer.items() if value is not None}
        for name in _overridden(given):
            values.pop(name, None)
            origins.pop(name, None)
        values |= given
        origins |= dict.fromkeys(given, origin)
    for name, each in OPTIONS.items():
        if each.is_required and name not in values:
            hint = ": the prompts: a file, - for stdin, or a dataset" if name == "input" else ""
            raise UsageError(f"{each.flag} is missing{hint}")
    generation = {name: value for name, value in values.items() if name in GENERATION_OPTIONS}
    try:
        resolve({}, generation)
    except ParamError as error:
        raise UsageError(str(error)) from None
    own = {name: each.checked(values[name]) for name, each in RUN_OPTIONS.items() if name in values}
    return RunSettings(**own, generation=generation, origins=origins)


def _overridden(given: Mapping[str, Any]) -> Iterator[str]:
    """Names that are dropped from the weaker layer: they exclude a setting that is given here."""
    for names in _EITHER_OR:
        found = [name for name in names if name in given]
        if len(found) > 1:
            raise UsageError(f"{' and '.join(OPTIONS[name].flag for name in found)} can't be combined: give one")
        if found:
            yield from names

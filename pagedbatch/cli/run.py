"""`pagedbatch run`: its flags, and the terminal around a job. Knows no engine and no file of rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

import typer

from pagedbatch.cli.terminal import say
from pagedbatch.errors import UsageError
from pagedbatch.printable import printable_values
from pagedbatch.run.interrupts import EXIT_INTERRUPTED

_input = partial(typer.Option, rich_help_panel="Input", show_default=False)
_generation = partial(typer.Option, rich_help_panel="Generation", show_default=False)
_beams = partial(typer.Option, rich_help_panel="Beams", show_default=False)
_constraints = partial(typer.Option, rich_help_panel="Constraints", show_default=False)
_engine = partial(typer.Option, rich_help_panel="Engine", show_default=False)
_workers = partial(typer.Option, rich_help_panel="Workers", show_default=False)
_output = partial(typer.Option, rich_help_panel="Output", show_default=False)

_INPUT_HELP = ".jsonl, .json, .csv, .tsv, .txt (also .gz, .zst), .parquet, - for stdin, a dataset's folder or Hub name."
_TEMPLATE_HELP = r"A prompt made from columns: 'Q: {question}\nA:'. \n and \t are understood."
_SHARD_HELP = "Run slice I of N of the rows, I from 0, after --limit; `pagedbatch merge` puts the outputs together."
_DELIMITER_HELP = "What parts the columns of CSV: comma, tab, semicolon or pipe. (default: comma; tab for .tsv)"
_STREAMING_HELP = "Read a dataset without downloading the whole; --limit then reads no more than it needs."
_IGNORE_HELP = "Columns that are data, whatever their names mean as options, as A,B or repeated."
_SERVED_HELP = "The name by which OpenAI batch rows ask for the model; others fail. (default: MODEL or its folder)"
_LINE_HELP = "A longer line is an error row. (default: 64MiB)"
_PREPARE_HELP = "CPU seconds that one row's template, tokens and schema may take, else it is an error. (default: 5)"
_STRICT_HELP = "If any row can't be answered, list them all and stop before the weights are loaded."
_OUTPUT_HELP = "Records in input order, as JSONL; as Parquet if the name ends in .parquet; - for stdout."
_KEEP_HELP = "Columns to carry into the records, as a,b.c or repeated; * for all."
_RETRY_HELP = "Run rows again that ended as errors."
_SYSTEM_HELP = "Move system messages into the first user message, for templates that refuse them."
_KWARGS_HELP = """JSON object of variables for the chat template: '{"enable_thinking": false}'; rows may add theirs."""
_CONTINUE_HELP = "Go on with an assistant message that stands last, instead of closing it. (default: off)"
_TURN_HELP = "Open an assistant's turn behind the messages. (default: on)"
_DATE_HELP = "The day, as YYYY-MM-DD, that a chat template writes as today's. (default: that of the run's first start)"
_BOS_HELP = "Put BOS before text prompts, or don't. (default: the tokenizer's way, and never a second one)"
_TRUNCATE_HELP = (
    "left or right cuts a prompt too long for an output, down to half the context at most. (default: error)"
)
_CONFIG_HELP = "auto or none: whether the model's defaults count; its end tokens always do. (default: auto)"
_ADAPTER_HELP = "Take a model's own weights where an adapter lies beside them; without this it is refused."
_MODEL_LEN_HELP = "Most tokens per sequence, prompt included. (default: what the model's config says)"
_TEMPERATURE_HELP = "0 is greedy. (default: the model's where it samples, else 0, or 1.0 for n > 1)"
_STOP_HELP = r"Text to stop at, left out of the output; repeatable. \n and \t are understood."
_BEST_OF_HELP = "Draw so many samples and write the n of best mean logprob, the best first. (default: n)"
_SAMPLE_INDEX_HELP = "Number of a row's first sample; one seed, row id and number draw the same. (default: 0)"
_THINKING_HELP = "Close the thinking part of an output after so many tokens, which --max-tokens counts too."
_SPECIAL_HELP = "Leave special tokens out of the text. (default: on)"
_LOGPROBS_MODE_HELP = "raw: the model's own; processed: after every control and filter. (default: raw)"
_PROMPT_LOGPROBS_HELP = "Write raw logprobs of the prompt's tokens, with the K most likely ones."
_PRESENCE_HELP = "Subtracted once from tokens that the output holds; the prompt doesn't count."
_FREQUENCY_HELP = "Subtracted for each time that the output holds a token; the prompt doesn't count."
_REPETITION_HELP = "Divides positive and multiplies negative scores of tokens in prompt or output."
_NGRAM_HELP = "No run of so many tokens twice; prompt and output count."
_BAD_WORDS_HELP = "Text never to write, in these very tokens; repeatable. Rows may give lists of token ids."
_ALLOWED_HELP = "Token id that may be written, and no other; repeatable. Give an end token too."
_MAX_NUM_SEQS_HELP = "Most sequences at once; more samples of a row take turns, its beams don't. (default: 128)"
_MERGE_HELP = "Beams that differ in their end token alone are one, with the likeliest; items of a catalog always are."
_BEAM_GROUPS_HELP = "Diverse beam search: so many groups of beams, of one size, that avoid each other's tokens."
_DIVERSITY_HELP = "Subtracted from a token's logprob for each beam of an earlier group that takes it at the same step."
_WORKERS_HELP = "So many engines, one a GPU or a share of the CPUs, in processes of their own; sizes are those of each."
_RAY_HELP = "Workers on a running Ray cluster: auto or HOST:PORT. (default workers: one a GPU, else one a machine)"
_BIAS_HELP = """JSON object of token id to bias: '{"50256": -100}'."""

_CATALOG_HELP = "Outputs are items of this file, one a line: text, or a JSON list of token ids."
_SCHEMA_HELP = "Outputs are JSON of this schema, a file or the JSON itself."
_BLOCK_SIZE_HELP = "Token slots a block; on a CPU, multiples of 16 are fastest. (default: 16)"
_GRAMMAR_HELP = "Outputs are texts of this EBNF grammar, whose first rule is root."


def run(
    # Everything defaults to None, "not given", so that a recipe can say what the command line does not.
    input: Annotated[str | None, typer.Argument(metavar="INPUT", show_default=False, help=_INPUT_HELP)] = None,
    model: Annotated[str | None, _input("--model", "-m", help="Hub id, folder, or .gguf file.")] = None,
    recipe: Annotated[str | None, _input(help="TOML file with any of these settings.")] = None,
    split: Annotated[str | None, _input(help="Split of a dataset.")] = None,
    subset: Annotated[str | None, _input(help="Subset of a Hub dataset.")] = None,
    streaming: Annotated[bool | None, _input("--streaming", help=_STREAMING_HELP)] = None,
    csv_delimiter: Annotated[str | None, _input(metavar="MARK", help=_DELIMITER_HELP)] = None,
    prompt_column: Annotated[str | None, _input(help="Column that holds the prompt.")] = None,
    prompt_template: Annotated[str | None, _input(help=_TEMPLATE_HELP)] = None,
    chat: Annotated[bool | None, _input("--chat/--no-chat", help="Wrap prompts in the chat template.")] = None,
    chat_template_kwargs: Annotated[str | None, _input(metavar="JSON", help=_KWARGS_HELP)] = None,
    continue_final_message: Annotated[bool | None, _input(help=_CONTINUE_HELP)] = None,
    add_generation_prompt: Annotated[bool | None, _input(help=_TURN_HELP)] = None,
    date: Annotated[str | None, _input(metavar="DAY", help=_DATE_HELP)] = None,
    system_to_user: Annotated[bool | None, _input(help=_SYSTEM_HELP)] = None,
    add_bos: Annotated[bool | None, _input(help=_BOS_HELP)] = None,
    truncate_prompt: Annotated[str | None, _input(help=_TRUNCATE_HELP)] = None,
    generation_config: Annotated[str | None, _input(help=_CONFIG_HELP)] = None,
    limit: Annotated[int | None, _input(help="Run only the first N rows.")] = None,
    shard: Annotated[str | None, _input(metavar="I/N", help=_SHARD_HELP)] = None,
    allow_duplicate_ids: Annotated[bool | None, _input("--allow-duplicate-ids", help="Rows may share an id.")] = None,
    ignore_columns: Annotated[list[str] | None, _input(help=_IGNORE_HELP)] = None,
    served_model_name: Annotated[str | None, _input(help=_SERVED_HELP)] = None,
    max_line_bytes: Annotated[str | None, _input(help=_LINE_HELP)] = None,
    row_prepare_timeout: Annotated[float | None, _input(metavar="SECONDS", help=_PREPARE_HELP)] = None,
    strict: Annotated[bool | None, _input("--strict", help=_STRICT_HELP)] = None,
    trust_remote_code: Annotated[bool | None, _input("--trust-remote-code", help="Run the model's own code.")] = None,
    ignore_adapter: Annotated[bool | None, _input("--ignore-adapter", help=_ADAPTER_HELP)] = None,
    n: Annotated[int | None, _generation("--n", "-n", help="Outputs a row. (default: 1)")] = None,
    best_of: Annotated[int | None, _generation(help=_BEST_OF_HELP)] = None,
    sample_index: Annotated[int | None, _generation(help=_SAMPLE_INDEX_HELP)] = None,
    temperature: Annotated[float | None, _generation(help=_TEMPERATURE_HELP)] = None,
    top_p: Annotated[float | None, _generation(help="Sample from the most likely, up to this mass.")] = None,
    top_k: Annotated[int | None, _generation(help="Sample from the k most likely; 0 is off.")] = None,
    min_p: Annotated[float | None, _generation(help="Drop tokens below this share of the likeliest.")] = None,
    seed: Annotated[int | None, _generation(help="Same seed and row id: same outputs. (default: 0)")] = None,
    max_tokens: Annotated[int | None, _generation(help="Most new tokens an output; 0 for none. (default: 256)")] = None,
    min_tokens: Annotated[int | None, _generation(help="No end before so many new tokens.")] = None,
    thinking_budget: Annotated[int | None, _generation(help=_THINKING_HELP)] = None,
    stop: Annotated[list[str] | None, _generation(help=_STOP_HELP)] = None,
    stop_token_ids: Annotated[list[int] | None, _generation(help="Token id to stop at; repeatable.")] = None,
    include_stop: Annotated[bool | None, _generation(help="Keep the stop string in the text.")] = None,
    ignore_eos: Annotated[bool | None, _generation("--ignore-eos", help="Go on after end tokens.")] = None,
    skip_special_tokens: Annotated[bool | None, _generation(help=_SPECIAL_HELP)] = None,
    logprobs: Annotated[int | None, _generation(help="Write logprobs, with the K most likely tokens.")] = None,
    logprobs_mode: Annotated[str | None, _generation(help=_LOGPROBS_MODE_HELP)] = None,
    prompt_logprobs: Annotated[int | None, _generation(help=_PROMPT_LOGPROBS_HELP)] = None,
    presence_penalty: Annotated[float | None, _generation(help=_PRESENCE_HELP)] = None,
    frequency_penalty: Annotated[float | None, _generation(help=_FREQUENCY_HELP)] = None,
    repetition_penalty: Annotated[float | None, _generation(help=_REPETITION_HELP)] = None,
    no_repeat_ngram_size: Annotated[int | None, _generation(help=_NGRAM_HELP)] = None,
    logit_bias: Annotated[str | None, _generation(help=_BIAS_HELP)] = None,
    bad_words: Annotated[list[str] | None, _generation(help=_BAD_WORDS_HELP)] = None,
    allowed_token_ids: Annotated[list[int] | None, _generation(help=_ALLOWED_HELP)] = None,
    num_beams: Annotated[int | None, _beams(help="Beam search of this width; n outputs of it are written.")] = None,
    length_penalty: Annotated[float | None, _beams(help="score = logprob / length ** this. (default: 1.0)")] = None,
    early_stopping: Annotated[str | None, _beams(help="true, false or never. (default: false)")] = None,
    merge_end_tokens: Annotated[bool | None, _beams(help=_MERGE_HELP)] = None,
    num_beam_groups: Annotated[int | None, _beams(help=_BEAM_GROUPS_HELP)] = None,
    diversity_penalty: Annotated[float | None, _beams(help=_DIVERSITY_HELP)] = None,
    constrain_to: Annotated[str | None, _constraints(metavar="FILE", help=_CATALOG_HELP)] = None,
    json_schema: Annotated[str | None, _constraints(metavar="FILE|JSON", help=_SCHEMA_HELP)] = None,
    regex: Annotated[str | None, _constraints(help="Outputs match this regular expression as a whole.")] = None,
    grammar: Annotated[str | None, _constraints(metavar="FILE", help=_GRAMMAR_HELP)] = None,
    max_model_len: Annotated[int | None, _engine(help=_MODEL_LEN_HELP)] = None,
    block_size: Annotated[int | None, _engine(help=_BLOCK_SIZE_HELP)] = None,
    kv_memory: Annotated[str | None, _engine(help="Pool size: 4GiB. (default: what is free, with a margin)")] = None,
    num_blocks: Annotated[int | None, _engine(help="Pool size in blocks, instead of --kv-memory.")] = None,
    max_num_seqs: Annotated[int | None, _engine(help=_MAX_NUM_SEQS_HELP)] = None,
    max_num_batched_tokens: Annotated[int | None, _engine(help="Most tokens a step. (default: 2048)")] = None,
    preemption: Annotated[str | None, _engine(help="auto, swap or recompute. (default: auto)")] = None,
    swap_space: Annotated[str | None, _engine(help="Host memory for swapped blocks. (default: 1GiB)")] = None,
    prefix_cache: Annotated[bool | None, _engine("--prefix-cache/--no-prefix-cache", help="(default: on)")] = None,
    attention: Annotated[str | None, _engine(help="auto, triton, cpu or torch. (default: auto)")] = None,
    forward: Annotated[
        str | None, _engine(help="auto, or plain: transformers' own, also where there is a leaner one. (default: auto)")
    ] = None,
    device: Annotated[str | None, _engine(help="auto, cpu or cuda. (default: auto)")] = None,
    dtype: Annotated[str | None, _engine(help="auto, float32, bfloat16 or float16. (default: auto)")] = None,
    workers: Annotated[int | None, _workers(help=_WORKERS_HELP)] = None,
    ray_address: Annotated[str | None, _workers(metavar="ADDRESS", help=_RAY_HELP)] = None,
    output: Annotated[str | None, _output("--output", "-o", help=_OUTPUT_HELP)] = None,
    keep: Annotated[list[str] | None, _output(help=_KEEP_HELP)] = None,
    retry_errors: Annotated[bool | None, _output("--retry-errors", help=_RETRY_HELP)] = None,
    restart: Annotated[bool | None, _output("--restart", help="Begin anew, whatever an earlier run left.")] = None,
) -> int:
    """Answer every row of INPUT. The same command again resumes a run that was cut off."""
    flags = {name: value for name, value in locals().items() if name != "recipe"}
    return run_command(given_settings(flags), recipe)


def given_settings(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that flags give, by name; None: not given. What is typed in a shell's way is read.

    Raises:
        UsageError: a flag holds malformed JSON.
    """
    given = {name: None if value == [] else value for name, value in flags.items()}
    for name in ("stop", "bad_words"):
        texts = given[name]
        given[name] = None if texts is None else [_unescape(text) for text in texts]
    if given["prompt_template"] is not None:
        given["prompt_template"] = _unescape(given["prompt_template"])
    for name in ("logit_bias", "chat_template_kwargs"):
        text = given[name]
        given[name] = None if text is None else _json_object(f"--{name.replace('_', '-')}", text)
    return given


def run_command(given: dict[str, Any], recipe: str | None) -> int:
    """Runs a job with the settings that the command line gave (None: not given), and reports on stderr."""
    from rich.console import Console

    from pagedbatch.cli.progress import make_progress
    from pagedbatch.report.summary import summary
    from pagedbatch.run.job import Ui, run_job
    from pagedbatch.settings import merge, read_recipe

    settings = merge(given, {} if recipe is None else read_recipe(recipe))
    console = Console(stderr=True)
    ui = Ui(
        notice=say,
        open_view=lambda total, resumed: make_progress(total, resumed, console),
    )
    try:
        result = run_job(settings, ui)
    except KeyboardInterrupt:
        say("interrupted before the first row")
        return EXIT_INTERRUPTED
    summary(printable_values(result.stats), console)
    if result.paths is not None:
        say(f"stats     {result.paths.stats}")
        if result.exit_code != EXIT_INTERRUPTED:
            say(f"output    {result.paths.output}")
    return result.exit_code


def _unescape(text: str) -> str:
    r"""Shells hand over `\n` as two characters; in a text to match or to fill it means a line end."""
    parts = text.split("\\\\")
    return "\\".join(part.replace("\\n", "\n").replace("\\t", "\t") for part in parts)


def _json_object(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{name}: malformed JSON: {error.msg} at column {error.colno}") from None

"""The generation options, which a run or a row may give, and the combinations that are refused.

Names are OpenAI's where OpenAI has one, else Hugging Face's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from pagedbatch.errors import ParamError
from pagedbatch.options import option, options_of
from pagedbatch.readers import (
    INT64,
    MAX_ADDED,
    MAX_TOKEN_ID,
    BadWord,
    Reader,
    biases,
    boolean,
    choice,
    integer,
    num_logprobs,
    number,
    some_token_ids,
    stop_strings,
    stopping_rule,
    text,
    token_ids,
    words_or_ids,
)

DEFAULT_MAX_TOKENS = 256
#: Maximum samples or beams of a row. Each takes a kilobyte of host memory before it has a token.
MAX_WIDTH = 2**16
#: Above this, all tokens are about equally likely.
MAX_TEMPERATURE = 1e6
#: Logits are multiplied or divided by at most this, so that they stay finite in float32 after biases and penalties.
MAX_FACTOR = 1e6
MAX_LOGPROBS = 100
#: A seed is only hashed, so a UUID may be one.
MAX_SEED = 2**128
#: `length ** length_penalty`, and a score divided by it, stay finite for every length up to 2**31 tokens.
MAX_LENGTH_PENALTY = 32

#: Defaults of a model that are dropped when samples are drawn, and when beams are searched.
_BEAM_SEARCH_ONLY = frozenset({"num_beams", "num_beam_groups", "diversity_penalty"})
_SAMPLING_ONLY = frozenset({"temperature", "top_p", "top_k", "min_p"})

_prompts = partial(option, group="Prompts")
_length = partial(option, group="Length and stopping")
_sampling = partial(option, group="Sampling")
_penalties = partial(option, group="Penalties and token filters")
_logprobs = partial(option, group="Logprobs")
_beams = partial(option, group="Beam search")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationParams:
    """The resolved settings of one request. What each means is said in its help.

    `num_beams` > 1 is beam search, and then `n` is how many of its hypotheses are returned. Samples are numbered from
    `sample_index` on. `allowed_token_ids` empty allows all.
    """

    add_generation_prompt: bool | None = _prompts(
        None, boolean, "Begin the assistant's answer after the last message of a chat.", default_text="on"
    )
    continue_final_message: bool = _prompts(
        False, boolean, "Continue the last message of a chat, if it is the assistant's, instead of closing it."
    )
    system_to_user: bool = _prompts(
        False, boolean, "Move system messages into the first user message, for chat templates that refuse them."
    )
    add_bos: bool | None = _prompts(
        None,
        boolean,
        "Put the BOS token before text prompts.",
        default_text="as the tokenizer does, and never a second one",
    )
    truncate_prompt: str = _prompts(
        "error",
        choice("error", "left", "right"),
        "What happens to a prompt that leaves no room for an output: an error, or its left or right end is cut off, "
        "down to half of the context at most.",
    )

    source_lang: str | None = _prompts(
        None, text, "Language of the prompts, as the tokenizer of a translation model names it, such as eng_Latn."
    )
    target_lang: str | None = _prompts(
        None, text, "Language to translate into, as the tokenizer of a translation model names it."
    )

    max_tokens: int = _length(
        DEFAULT_MAX_TOKENS, integer(0, INT64), "Maximum new tokens per output. 0 generates nothing."
    )
    max_tokens_per_source_token: float | None = _length(
        None,
        number(0, MAX_FACTOR, above_low=True),
        "Of an encoder-decoder: maximum new tokens per output for each token of its source, if below --max-tokens.",
        default_text="no limit",
    )
    min_tokens: int = _length(0, integer(0, INT64), "Minimum new tokens per output: none ends before.")
    stop: tuple[str, ...] = _length(
        (), stop_strings, r"Stop at this text, which the output leaves out. Repeatable. \n and \t are understood."
    )
    stop_token_ids: tuple[int, ...] = _length((), token_ids, "Stop at this token id. Repeatable.")
    include_stop: bool = _length(False, boolean, "Keep the stop string in the output's text.")
    forced_bos_token_id: int | None = _length(
        None, integer(0, MAX_TOKEN_ID), "First token of each output, where nothing but one start token is before it."
    )
    forced_eos_token_id: int | None = _length(
        None, integer(0, MAX_TOKEN_ID), "Last token of each output that reaches --max-tokens."
    )
    ignore_eos: bool = _length(False, boolean, "Continue after the model's end tokens.")
    skip_special_tokens: bool = _length(True, boolean, "Leave special tokens out of the output's text.")
    thinking_budget: int | None = _length(
        None,
        integer(0, INT64),
        "Close the thinking part of an output after this many tokens. --max-tokens counts them too.",
        default_text="no limit",
    )

    n: int = _sampling(1, integer(1, MAX_WIDTH), "Number of outputs per row.", short="-n")
    best_of: int | None = _sampling(
        None,
        integer(1, MAX_WIDTH),
        "Number of samples to draw. The n with the best mean logprob are written, the best first.",
        default_text="n",
    )
    sample_index: int = _sampling(
        0,
        integer(0, INT64),
        "Number of a row's first sample. A sample depends only on the seed, the row's id and its own number.",
    )
    temperature: float = _sampling(
        0.0,
        number(0, MAX_TEMPERATURE),
        "Sampling temperature. 0 is greedy: the most likely token each time.",
        default_text="the model's, if it samples by default; else 0 for one output and 1 for several",
    )
    top_p: float = _sampling(
        1.0, number(0, 1, above_low=True), "Sample from the most likely tokens whose probabilities add up to this."
    )
    top_k: int = _sampling(0, integer(-1, INT64), "Sample from the K most likely tokens. 0 or -1: from all.")
    min_p: float = _sampling(
        0.0, number(0, 1), "Leave out tokens whose probability is below this share of the most likely one's."
    )
    seed: int = _sampling(
        0, integer(-MAX_SEED, MAX_SEED), "Random seed. The same seed and row id give the same outputs."
    )

    presence_penalty: float = _penalties(
        0.0, number(-MAX_ADDED, MAX_ADDED), "Subtracted once from the logit of each token that the output contains."
    )
    frequency_penalty: float = _penalties(
        0.0, number(-MAX_ADDED, MAX_ADDED), "Subtracted from a token's logit for each time that the output contains it."
    )
    repetition_penalty: float = _penalties(
        1.0,
        number(1 / MAX_FACTOR, MAX_FACTOR),
        "Divides positive and multiplies negative logits of tokens that the prompt or the output contains.",
    )
    no_repeat_ngram_size: int = _penalties(
        0, integer(0, INT64), "No sequence of this many tokens occurs twice in prompt and output. 0: any may."
    )
    logit_bias: tuple[tuple[int, float], ...] = _penalties(
        (), biases, "What is added to the logits of tokens, by token id, such as '{\"50256\":-100}'."
    )
    bad_words: tuple[BadWord, ...] = _penalties(
        (),
        words_or_ids,
        "Text that is never generated, as the tokenizer encodes it. Repeatable. Rows may also give lists of token ids.",
    )
    allowed_token_ids: tuple[int, ...] = _penalties(
        (), some_token_ids, "Generate only these token ids. Repeatable. Include an end token."
    )

    logprobs: int | None = _logprobs(
        None,
        num_logprobs(MAX_LOGPROBS),
        "Write the logprob of each output token, and the K most likely tokens beside it.",
    )
    logprobs_mode: str = _logprobs(
        "raw",
        choice("raw", "processed"),
        "raw: logprobs as the model gives them. processed: after all penalties, biases and filters.",
    )
    prompt_logprobs: int | None = _logprobs(
        None, num_logprobs(MAX_LOGPROBS), "The same for each token of the prompt, always raw."
    )

    num_beams: int = _beams(
        1, integer(1, MAX_WIDTH), "Beam search of this width; the n best of its outputs are written."
    )
    length_penalty: float = _beams(
        1.0,
        number(-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY),
        "A beam's score is its logprob divided by its length to the power of this.",
    )
    early_stopping: bool | str = _beams(
        False,
        stopping_rule,
        "When a search ends. true: with --num-beams finished outputs. false: when the best live beam, at its present "
        "length, is no better than the worst of them. never: when no live beam can still win at any length.",
    )
    merge_end_tokens: bool = _beams(
        False,
        boolean,
        "Beams that differ only in their end token count as one, the likeliest. Items of a catalog always do.",
    )
    num_beam_groups: int = _beams(
        1, integer(1, MAX_WIDTH), "Diverse beam search: number of equal groups, which avoid each other's tokens."
    )
    diversity_penalty: float | None = _beams(
        None,
        number(0, MAX_ADDED),
        "Subtracted from a token's logprob for each beam of an earlier group that takes it at the same step.",
    )

    @property
    def use_beam_search(self) -> bool:
        return self.num_beams > 1

    @property
    def beams_per_group(self) -> int:
        """Beams that are ranked against each other: all of them, except in diverse beam search."""
        return self.num_beams // self.num_beam_groups

    @property
    def num_samples(self) -> int:
        """Samples to draw; meaningless in beam search."""
        return self.n if self.best_of is None else self.best_of

    @property
    def sample_indices(self) -> tuple[int, ...]:
        return tuple(range(self.sample_index, self.sample_index + self.num_samples))

    @property
    def opens_assistant_turn(self) -> bool:
        """Whether a chat's prompt ends with the beginning of an answer."""
        return not self.continue_final_message and self.add_generation_prompt is not False

    @property
    def bad_words_ids(self) -> list[tuple[int, ...]]:
        """The token sequences among `bad_words`: all of them, once the texts have been encoded."""
        return [word for word in self.bad_words if not isinstance(word, str)]

    @property
    def width(self) -> int:
        """Number of sequences after the first token: samples or beams."""
        return self.num_beams if self.use_beam_search else self.num_samples

    @property
    def reads_history(self) -> bool:
        """Whether a logits processor looks at the tokens so far."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.no_repeat_ngram_size > 0
            or any(len(word) > 1 for word in self.bad_words_ids)
        )


#: The options that both a run and a row may give.
GENERATION_OPTIONS = options_of(GenerationParams, in_rows=True)
#: How each of them is read from JSON or TOML.
READERS: dict[str, Reader] = {name: each.read for name, each in GENERATION_OPTIONS.items()}


def resolve(model_defaults: Mapping[str, Any], *layers: Mapping[str, Any]) -> GenerationParams:
    """Merges setting layers, the strongest last, into checked parameters.

    Each layer maps names to raw values; `None` means "not given here". If nobody gives a temperature, it is 0 (greedy)
    for one output and 1.0 for several samples. The model's defaults give way to all layers.

    Raises:
        ParamError: a value has the wrong type or range, or two settings can't be combined.
    """
    asked = {name: value for layer in layers for name, value in layer.items() if value is not None}
    asked = {name: READERS[name](name, value) for name, value in asked.items()}
    defaults = {name: READERS[name](name, value) for name, value in model_defaults.items() if name not in asked}
    values = {**_compatible(defaults, asked), **asked}
    uses_beams = values.get("num_beams", 1) > 1
    if "temperature" not in asked and (uses_beams or "temperature" not in values):
        num_samples = values.get("best_of") or values.get("n", 1)
        values["temperature"] = 1.0 if num_samples > 1 and not uses_beams else 0.0
    params = GenerationParams(**values)
    _check(params)
    return params


def _compatible(defaults: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """The model's defaults that can be combined with what was asked for.

    Asking for samples drops defaults of beam search, asking for beams drops default groups of beams, and beam search
    drops defaults of sampling. A default minimum or maximum of tokens gives way to an asked maximum or minimum.
    """
    samples = asked.get("temperature", 0) > 0 or asked.get("n", 1) > defaults.get("num_beams", 1)
    if samples or any(name in asked for name in ("best_of", "sample_index", "num_beams")):
        defaults = {name: value for name, value in defaults.items() if name not in _BEAM_SEARCH_ONLY}
    if asked.get("num_beams", defaults.get("num_beams", 1)) > 1:
        defaults = {name: value for name, value in defaults.items() if name not in _SAMPLING_ONLY}
    if "min_tokens" in defaults and "max_tokens" in asked:
        defaults["min_tokens"] = min(defaults["min_tokens"], max(0, asked["max_tokens"]))
    if "max_tokens" in defaults and "min_tokens" in asked:
        defaults["max_tokens"] = max(defaults["max_tokens"], asked["min_tokens"])
    return defaults


def _check(p: GenerationParams) -> None:
    if p.best_of is not None and p.best_of < p.n:
        raise ParamError(f"best_of {p.best_of} is below n {p.n}: at least n samples must be drawn")
    if p.min_tokens > p.max_tokens:
        raise ParamError(f"min_tokens {p.min_tokens} is above max_tokens {p.max_tokens}")
    if p.continue_final_message and p.add_generation_prompt:
        raise ParamError(
            "continue_final_message and add_generation_prompt can't both be true: a turn goes on, or a new one begins"
        )
    _check_beams(p)
    if not p.use_beam_search and p.num_samples > 1 and p.temperature == 0:
        name = "n" if p.best_of is None else "best_of"
        raise ParamError(
            f"{name} {p.num_samples} with temperature 0 gives {p.num_samples} equal outputs: "
            f"raise the temperature or set num_beams"
        )


def _check_beams(p: GenerationParams) -> None:
    if p.use_beam_search and p.n > p.num_beams:
        raise ParamError(f"n {p.n} is above num_beams {p.num_beams}: beam search returns at most num_beams outputs")
    if p.use_beam_search and p.temperature > 0:
        raise ParamError(
            f"temperature {p.temperature} can't be combined with num_beams {p.num_beams}: beams don't sample"
        )
    if p.use_beam_search and (p.best_of is not None or p.sample_index > 0):
        name = "sample_index" if p.best_of is None else "best_of"
        raise ParamError(
            f"{name} {getattr(p, name)} can't be combined with num_beams {p.num_beams}: beams don't sample"
        )
    if p.num_beams % p.num_beam_groups:
        raise ParamError(f"num_beams {p.num_beams} can't be split into num_beam_groups {p.num_beam_groups} of one size")
    if p.num_beam_groups > 1 and p.diversity_penalty is None:
        raise ParamError(
            f"num_beam_groups {p.num_beam_groups} without a diversity_penalty gives equal groups: set one, such as 0.5"
        )
    if p.diversity_penalty and p.num_beam_groups == 1:
        raise ParamError(
            f"diversity_penalty {p.diversity_penalty} has no meaning for one group of beams: set num_beam_groups"
        )

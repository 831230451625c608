"""What a row may ask of generation: names, types, ranges and the combinations that are refused.

Knows nothing about models, files or flags. Names are OpenAI's where OpenAI has one, else Hugging Face's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from pagedbatch.errors import ParamError
from pagedbatch.readers import (
    INT64,
    MAX_ADDED,
    BadWord,
    Reader,
    allowed_token_ids,
    bad_words,
    boolean,
    choice,
    early_stopping,
    integer,
    logit_bias,
    logprobs,
    number,
    stop_strings,
    token_ids,
)

DEFAULT_MAX_TOKENS = 256
#: Samples or beams of a row. Each takes a kilobyte of host memory before it has a token.
MAX_WIDTH = 2**16
#: From here on a draw is as good as one from all tokens alike.
MAX_TEMPERATURE = 1e6
#: What scores are multiplied by, or divided by: so that they stay finite in float32 after biases and penalties.
MAX_FACTOR = 1e6
MAX_LOGPROBS = 100
#: Hashed, not counted with: room for a UUID.
MAX_SEED = 2**128
#: `length ** length_penalty`, and a score divided by it, stay finite for every length up to 2**31 tokens.
MAX_LENGTH_PENALTY = 32

#: Defaults of a model that have no meaning beside samples, and beside beams.
_OF_BEAMS = frozenset({"num_beams", "num_beam_groups", "diversity_penalty"})
_OF_SAMPLES = frozenset({"temperature", "top_p", "top_k", "min_p"})


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationParams:
    """The resolved settings of one request.

    `temperature` 0 is greedy. `num_beams` > 1 is beam search and then `n` is how many of its hypotheses are
    returned. `best_of` samples are drawn and the `n` with the best mean logprob returned, the best first. Samples
    are numbered from `sample_index` on: a sample depends on the seed, the row's id and its number alone. `logprobs`
    K asks for the chosen token's logprob and the K most likely tokens of each position, `prompt_logprobs` K for the
    same of the prompt. `max_tokens` 0 generates nothing. `add_bos` None leaves BOS to the tokenizer.
    `thinking_budget` None lets the thinking part of an output be as long as it likes.
    `merge_end_tokens`: beams that differ in their end token alone are one, with the likeliest.
    `allowed_token_ids` empty allows all. `continue_final_message` leaves a chat's last message open; else, unless
    `add_generation_prompt` is False, an assistant's turn is opened behind it.
    """

    n: int = 1
    best_of: int | None = None
    sample_index: int = 0
    num_beams: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int = DEFAULT_MAX_TOKENS
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    logprobs_mode: str = "raw"
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[BadWord, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    truncate_prompt: str = "error"
    add_bos: bool | None = None
    system_to_user: bool = False
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    merge_end_tokens: bool = False
    thinking_budget: int | None = None
    num_beam_groups: int = 1
    diversity_penalty: float | None = None
    """Diverse beam search: what a group's scores lose for each time that an earlier group went on with a token now."""

    @property
    def use_beam_search(self) -> bool:
        return self.num_beams > 1

    @property
    def beams_per_group(self) -> int:
        """Beams that are ranked against each other: all, but in diverse beam search."""
        return self.num_beams // self.num_beam_groups

    @property
    def num_samples(self) -> int:
        """Samples that are drawn; without meaning in beam search."""
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
        """The token sequences among `bad_words`: all of them, once the strings were encoded."""
        return [word for word in self.bad_words if not isinstance(word, str)]

    @property
    def width(self) -> int:
        """Sequences after the first token: samples, or beams."""
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


#: How each field is read from JSON or TOML. The keys are exactly the fields of `GenerationParams`.
READERS: dict[str, Reader] = {
    "n": integer(1, MAX_WIDTH),
    "best_of": integer(1, MAX_WIDTH),
    "sample_index": integer(0, INT64),
    "num_beams": integer(1, MAX_WIDTH),
    "temperature": number(0, MAX_TEMPERATURE),
    "top_p": number(0, 1, above_low=True),
    "top_k": integer(-1, INT64),
    "min_p": number(0, 1),
    "seed": integer(-MAX_SEED, MAX_SEED),
    "max_tokens": integer(0, INT64),
    "min_tokens": integer(0, INT64),
    "stop": stop_strings,
    "stop_token_ids": token_ids,
    "include_stop": boolean,
    "ignore_eos": boolean,
    "skip_special_tokens": boolean,
    "logprobs": logprobs(MAX_LOGPROBS),
    "logprobs_mode": choice("raw", "processed"),
    "prompt_logprobs": logprobs(MAX_LOGPROBS),
    "presence_penalty": number(-MAX_ADDED, MAX_ADDED),
    "frequency_penalty": number(-MAX_ADDED, MAX_ADDED),
    "repetition_penalty": number(1 / MAX_FACTOR, MAX_FACTOR),
    "no_repeat_ngram_size": integer(0, INT64),
    "logit_bias": logit_bias,
    "bad_words": bad_words,
    "allowed_token_ids": allowed_token_ids,
    "truncate_prompt": choice("error", "left", "right"),
    "add_bos": boolean,
    "system_to_user": boolean,
    "continue_final_message": boolean,
    "add_generation_prompt": boolean,
    "length_penalty": number(-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY),
    "early_stopping": early_stopping,
    "merge_end_tokens": boolean,
    "thinking_budget": integer(0, INT64),
    "num_beam_groups": integer(1, MAX_WIDTH),
    "diversity_penalty": number(0, MAX_ADDED),
}
assert set(READERS) == {field.name for field in fields(GenerationParams)}


def resolve(model_defaults: Mapping[str, Any], *layers: Mapping[str, Any]) -> GenerationParams:
    """Merges setting layers, the strongest last, into checked parameters.

    Each layer maps field names to raw values; `None` means "not given here". Where nobody gives a temperature it is 0
    (greedy) for one output and 1.0 for several samples. What a model says by default gives way to what is asked.

    Raises:
        ParamError: a value has the wrong type or range, or two settings can't be combined.
    """
    asked = {name: value for layer in layers for name, value in layer.items() if value is not None}
    asked = {name: READERS[name](name, value) for name, value in asked.items()}
    defaults = {name: READERS[name](name, value) for name, value in model_defaults.items() if name not in asked}
    values = {**_beside(defaults, asked), **asked}
    uses_beams = values.get("num_beams", 1) > 1
    if "temperature" not in asked and (uses_beams or "temperature" not in values):
        num_samples = values.get("best_of") or values.get("n", 1)
        values["temperature"] = 1.0 if num_samples > 1 and not uses_beams else 0.0
    params = GenerationParams(**values)
    _check(params)
    return params


def _beside(defaults: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """The model's defaults that go with what is asked.

    Whoever asks for samples gets no beams, who asks for beams no groups of them, and who gets beams no sampling. An
    asked limit bounds a default minimum.
    """
    samples = asked.get("temperature", 0) > 0 or asked.get("n", 1) > defaults.get("num_beams", 1)
    if samples or any(name in asked for name in ("best_of", "sample_index", "num_beams")):
        defaults = {name: value for name, value in defaults.items() if name not in _OF_BEAMS}
    if asked.get("num_beams", defaults.get("num_beams", 1)) > 1:
        defaults = {name: value for name, value in defaults.items() if name not in _OF_SAMPLES}
    if "min_tokens" in defaults and "max_tokens" in asked:
        defaults["min_tokens"] = min(defaults["min_tokens"], max(0, asked["max_tokens"]))
    if "max_tokens" in defaults and "min_tokens" in asked:
        defaults["max_tokens"] = max(defaults["max_tokens"], asked["min_tokens"])
    return defaults


def _check(p: GenerationParams) -> None:
    if p.best_of is not None and p.best_of < p.n:
        raise ParamError(f"best_of {p.best_of} is below n {p.n}: so many samples must be drawn")
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

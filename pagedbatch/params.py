"""What a row may ask of generation: names, types, ranges and the combinations that are refused.

Knows nothing about models, files or flags. Names are OpenAI's where OpenAI has one, else Hugging Face's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from pagedbatch.errors import ParamError

DEFAULT_MAX_TOKENS = 256
#: `length ** length_penalty` stays a number for every length up to a million tokens.
MAX_LENGTH_PENALTY = 50
#: Each of them is looked for after each token.
MAX_STOP_STRINGS = 1000


#: Defaults of a model that have no meaning beside samples, and beside beams.
_OF_BEAMS = frozenset({"num_beams", "num_beam_groups", "diversity_penalty"})
_OF_SAMPLES = frozenset({"temperature", "top_p", "top_k", "min_p"})

#: A text, or the token ids of one.
BadWord = str | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationParams:
    """The resolved settings of one request.

    `temperature` 0 is greedy. `num_beams` > 1 is beam search and then `n` is how many of its hypotheses are
    returned. `best_of` samples are drawn and the `n` with the best mean logprob returned, the best first. Samples
    are numbered from `sample_index` on: a sample depends on the seed, the row's id and its number alone. `logprobs`
    K asks for the chosen token's logprob and the K most likely tokens of each position, `prompt_logprobs` K for the
    same of the prompt. `max_tokens` 0 generates nothing. `add_bos` None leaves BOS to the tokenizer.
    `allowed_token_ids` empty allows all.
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
    length_penalty: float = 1.0
    early_stopping: bool | str = False
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


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ParamError(f"{name} must be an integer, got {value!r}")
    return value


def _number(name: str, value: Any) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            raise ParamError(f"{name} must be a finite number, got an integer that is too large for one") from None
        if math.isfinite(number):
            return number
    raise ParamError(f"{name} must be a finite number, got {value!r}")


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ParamError(f"{name} must be true or false, got {value!r}")
    return value


def _strings(name: str, value: Any) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)) or not all(isinstance(item, str) and item for item in items):
        raise ParamError(f"{name} must be a non-empty string or a list of them, got {value!r}")
    if len(items) > MAX_STOP_STRINGS:
        raise ParamError(f"{name} lists {len(items)} strings, and {MAX_STOP_STRINGS} are the most")
    return tuple(items)


def _token_id(name: str, value: Any) -> int:
    if _integer(name, value) < 0:
        raise ParamError(f"{name}: {value} is not a token id")
    return int(value)


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    items = [value] if isinstance(value, int) else value
    if not isinstance(items, (list, tuple)):
        raise ParamError(f"{name} must be a list of token ids, got {value!r}")
    return tuple(_token_id(name, item) for item in items)


def _logit_bias(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, Mapping):
        raise ParamError(f"{name} must be an object of token id to bias, got {value!r}")
    pairs = []
    for key, bias in value.items():
        try:
            token_id = int(key) if isinstance(key, str) else key
        except ValueError:
            raise ParamError(f"{name}: {key!r} is not a token id") from None
        pairs.append((_token_id(name, token_id), _number(name, bias)))
    return tuple(sorted(pairs))


def _logprobs(name: str, value: Any) -> int | None:
    if value is False:
        return None
    return _integer(name, value)


def _bad_words(name: str, value: Any) -> tuple[BadWord, ...]:
    items = [value] if isinstance(value, str) else value
    if isinstance(items, (list, tuple)) and all(isinstance(item, (str, list, tuple)) and item for item in items):
        return tuple(item if isinstance(item, str) else _token_ids(name, item) for item in items)
    raise ParamError(f"{name} must be a list of texts or of lists of token ids, got {value!r}")


def _allowed_token_ids(name: str, value: Any) -> tuple[int, ...]:
    token_ids = _token_ids(name, value)
    if not token_ids:
        raise ParamError(f"{name} is empty: nothing could be generated")
    return tuple(sorted(set(token_ids)))


def _choice(*choices: str) -> Callable[[str, Any], str]:
    def read(name: str, value: Any) -> str:
        if value not in choices:
            raise ParamError(f"{name} must be {' or '.join(choices)}, got {value!r}")
        return str(value)

    return read


def _early_stopping(name: str, value: Any) -> bool | str:
    named = {"true": True, "false": False, "never": "never"}
    if isinstance(value, str) and value.lower() in named:
        value = named[value.lower()]
    if isinstance(value, bool) or value == "never":
        return "never" if value == "never" else bool(value)
    raise ParamError(f"{name} must be true, false or 'never', got {value!r}")


#: How each field is read from JSON or TOML. The keys are exactly the fields of `GenerationParams`.
READERS: dict[str, Callable[[str, Any], Any]] = {
    "n": _integer,
    "best_of": _integer,
    "sample_index": _integer,
    "num_beams": _integer,
    "temperature": _number,
    "top_p": _number,
    "top_k": _integer,
    "min_p": _number,
    "seed": _integer,
    "max_tokens": _integer,
    "min_tokens": _integer,
    "stop": _strings,
    "stop_token_ids": _token_ids,
    "include_stop": _boolean,
    "ignore_eos": _boolean,
    "skip_special_tokens": _boolean,
    "logprobs": _logprobs,
    "logprobs_mode": _choice("raw", "processed"),
    "prompt_logprobs": _logprobs,
    "presence_penalty": _number,
    "frequency_penalty": _number,
    "repetition_penalty": _number,
    "no_repeat_ngram_size": _integer,
    "logit_bias": _logit_bias,
    "bad_words": _bad_words,
    "allowed_token_ids": _allowed_token_ids,
    "truncate_prompt": _choice("error", "left", "right"),
    "add_bos": _boolean,
    "system_to_user": _boolean,
    "length_penalty": _number,
    "early_stopping": _early_stopping,
    "num_beam_groups": _integer,
    "diversity_penalty": _number,
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
    bounds = (
        (p.n >= 1, f"n must be at least 1, got {p.n}"),
        (p.best_of is None or p.best_of >= p.n, f"best_of {p.best_of} is below n {p.n}: so many samples must be drawn"),
        (p.sample_index >= 0, f"sample_index must be 0 or more, got {p.sample_index}"),
        (p.num_beams >= 1, f"num_beams must be at least 1, got {p.num_beams}"),
        (p.temperature >= 0, f"temperature must be 0 (greedy) or more, got {p.temperature}"),
        (0 < p.top_p <= 1, f"top_p must be above 0 and at most 1, got {p.top_p}"),
        (p.top_k >= -1, f"top_k must be 0 (off) or more, got {p.top_k}"),
        (0 <= p.min_p <= 1, f"min_p must lie between 0 and 1, got {p.min_p}"),
        (p.max_tokens >= 0, f"max_tokens must be 0 or more, got {p.max_tokens}"),
        (p.min_tokens >= 0, f"min_tokens must be 0 or more, got {p.min_tokens}"),
        (p.min_tokens <= p.max_tokens, f"min_tokens {p.min_tokens} is above max_tokens {p.max_tokens}"),
        (p.logprobs is None or 0 <= p.logprobs <= 100, f"logprobs must lie between 0 and 100, got {p.logprobs}"),
        (
            p.prompt_logprobs is None or 0 <= p.prompt_logprobs <= 100,
            f"prompt_logprobs must lie between 0 and 100, got {p.prompt_logprobs}",
        ),
        (p.repetition_penalty > 0, f"repetition_penalty must be above 0, got {p.repetition_penalty}"),
        (p.no_repeat_ngram_size >= 0, f"no_repeat_ngram_size must be 0 or more, got {p.no_repeat_ngram_size}"),
        (
            abs(p.length_penalty) <= MAX_LENGTH_PENALTY,
            f"length_penalty must lie between -{MAX_LENGTH_PENALTY} and {MAX_LENGTH_PENALTY}, got {p.length_penalty}",
        ),
        (p.num_beam_groups >= 1, f"num_beam_groups must be at least 1, got {p.num_beam_groups}"),
        (
            p.diversity_penalty is None or p.diversity_penalty >= 0,
            f"diversity_penalty must be 0 or more, got {p.diversity_penalty}",
        ),
    )
    for holds, message in bounds:
        if not holds:
            raise ParamError(message)
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

"""From a row to a request: its prompt as token ids, its parameters, its random key. Knows no engine and no file.

Whatever is wrong with a row is a `RowError` that says what and lets the others go on.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pagedbatch.constraint import Constraint
from pagedbatch.errors import ParamError, RowError, UsageError
from pagedbatch.job.constraints import ConstraintBuilder, ConstraintSource
from pagedbatch.job.encoder import PromptEncoder, checked_messages
from pagedbatch.job.messages import short
from pagedbatch.job.openai_batch import is_batch_row, plain_fields
from pagedbatch.job.rows import Row, id_hash, look_up
from pagedbatch.params import READERS, GenerationParams, resolve
from pagedbatch.readers import INT64, BadWord, integer
from pagedbatch.sequence import Request

PROMPT_FIELDS = ("prompt", "messages", "prompt_token_ids")


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What prompts, parameters and constraints are checked against."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int] = frozenset()
    num_token_ids: int | None = None
    """Ids from here on are no tokens; None: all of the vocabulary are."""


def template_fields(template: str) -> tuple[str, ...]:
    """The columns that a prompt template names.

    Raises:
        UsageError: the template is malformed, or does more than name columns.
    """
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise UsageError(f"--prompt-template: {error}; write {{{{ and }}}} for braces") from None
    names = []
    for _, name, spec, conversion in parts:
        if name is None:
            continue
        if not name or spec or conversion:
            raise UsageError(f"--prompt-template: {{{name}}} must be just the name of a column")
        names.append(name)
    if not names:
        raise UsageError("--prompt-template names no column: write for example 'Q: {question}'")
    return tuple(dict.fromkeys(names))


class PromptBuilder:
    """Makes requests from rows, with a Hugging Face tokenizer.

    `model_defaults` are generation parameters from the model's generation_config; `run_settings` those given for the
    whole run, as is `run_constraint`. A row's own win. `notice` takes one line about what was done to prompts.
    """

    def __init__(
        self,
        tokenizer: Any,
        limits: ModelLimits,
        *,
        model_defaults: Mapping[str, Any],
        run_settings: Mapping[str, Any],
        prompt_column: str | None = None,
        prompt_template: str | None = None,
        chat: bool = False,
        run_constraint: ConstraintSource | None = None,
        notice: Callable[[str], None],
    ) -> None:
        self._tokenizer = tokenizer
        self._encoder = PromptEncoder(tokenizer, chat=chat, notice=notice)
        self._limits = limits
        self._model_defaults = model_defaults
        self._run_settings = run_settings
        self._prompt_column = prompt_column
        self._prompt_template = prompt_template
        self._template_fields = template_fields(prompt_template) if prompt_template is not None else ()
        self._constraints = ConstraintBuilder(tokenizer, limits.vocab_size, limits.eos_token_ids, run_constraint)

    def request(self, row: Row) -> Request:
        """The request of a row.

        Raises:
            RowError: the row can't be answered.
        """
        if row.error is not None:
            raise RowError(row.error)
        assert row.id is not None
        try:
            fields = plain_fields(row.fields) if is_batch_row(row.fields) else row.fields
            params = self.resolve_params(fields)
            whole = self._prompt_token_ids(fields, params)
            prompt = self._encoder.truncate(whole, params, self._limits.max_model_len)
            priority = _priority(fields.get("priority"))
            params = self._fit(params, len(prompt))
            constraint = self.constraint(fields, params)
            if constraint is not None and constraint.max_tokens is not None:
                params = replace(params, max_tokens=constraint.max_tokens)  # no blocks for what can't come
        except RowError as error:
            raise RowError(f"{row.place}: {error}") from None
        num_truncated = len(whole) - len(prompt)
        return Request(row.index, prompt, params, id_hash(row.id, params.seed), priority, constraint, num_truncated)

    def constraint(self, fields: Mapping[str, Any], params: GenerationParams) -> Constraint | None:
        """What a row's outputs must obey: its own constraint, else the run's.

        Raises:
            RowError: it is malformed, can't be met, or can't be combined with a parameter.
        """
        return self._constraints.constraint(fields, params)

    def resolve_params(self, fields: Mapping[str, Any]) -> GenerationParams:
        """A row's parameters: its own over the run's over the model's.

        Raises:
            ParamError: a wrong type or value, or two that can't be combined.
        """
        own = {name: fields[name] for name in READERS if fields.get(name) is not None}
        params = resolve(self._model_defaults, self._run_settings, own)
        if params.bad_words:
            params = replace(params, bad_words=self._encoded(params.bad_words))
        for name, token_ids in (
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", [token_id for token_id, _ in params.logit_bias]),
            ("bad_words", [token_id for word in params.bad_words_ids for token_id in word]),
            ("allowed_token_ids", params.allowed_token_ids),
        ):
            self._check_vocabulary(name, token_ids)
        return params

    def _encoded(self, words: tuple[BadWord, ...]) -> tuple[tuple[int, ...], ...]:
        """Bad words as token ids: a text as it stands, and with a space before it where that is as many tokens."""
        encoded: dict[tuple[int, ...], None] = {}
        for word in words:
            if not isinstance(word, str):
                encoded[word] = None
                continue
            bare, spaced = (
                tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (word, f" {word}")
            )
            if not bare:
                raise ParamError(f"bad_words: {word!r} is no token")
            encoded[bare] = None
            if len(spaced) == len(bare):
                encoded[spaced] = None
        return tuple(encoded)

    def _fit(self, params: GenerationParams, prompt_len: int) -> GenerationParams:
        """Cuts `max_tokens` down to the room that the prompt leaves."""
        limit = self._limits.max_model_len
        if prompt_len == 0:
            raise RowError("the prompt is empty: it has no token to start from")
        if prompt_len > limit or (prompt_len == limit and params.max_tokens > 0):
            raise RowError(
                f"the prompt has {prompt_len} tokens, and the model's limit of {limit} leaves no room for one "
                f"(--truncate-prompt cuts prompts)"
            )
        room = limit - prompt_len
        if params.max_tokens <= room:
            return params
        return replace(params, max_tokens=room, min_tokens=min(params.min_tokens, room))

    def _prompt_token_ids(self, fields: Mapping[str, Any], params: GenerationParams) -> list[int]:
        encode = self._encoder.encode_text
        if self._prompt_column is not None:
            return encode(_column_text(fields, self._prompt_column), params)
        if self._prompt_template is not None:
            values = {name: _column_text(fields, name) for name in self._template_fields}
            return encode(_fill(self._prompt_template, values), params)
        given = [name for name in PROMPT_FIELDS if fields.get(name) is not None]
        if not given:
            raise RowError("no prompt: the row needs prompt, messages or prompt_token_ids")
        if len(given) > 1:
            raise RowError(f"{' and '.join(given)} are given: a row takes one of them")
        value = fields[given[0]]
        if given[0] == "prompt_token_ids":
            return self._checked_token_ids(value)
        if given[0] == "messages":
            return self._encoder.encode_messages(checked_messages(value), params)
        if not isinstance(value, str):
            raise RowError(f"prompt must be text, got {short(value)}")
        return encode(value, params)

    def _checked_token_ids(self, value: Any) -> list[int]:
        if not isinstance(value, list) or not all(type(token_id) is int for token_id in value):
            raise RowError(f"prompt_token_ids must be a list of integers, got {short(value)}")
        self._check_vocabulary("prompt_token_ids", value)
        return list(value)

    def _check_vocabulary(self, name: str, token_ids: Any) -> None:
        size = self._limits.vocab_size
        num_tokens = size if self._limits.num_token_ids is None else self._limits.num_token_ids
        for token_id in token_ids:
            if not 0 <= token_id < size:
                raise ParamError(f"{name}: {token_id} is no token id of this model, whose vocabulary has {size}")
            if token_id >= num_tokens:
                raise ParamError(
                    f"{name}: {token_id} is no token of this model's tokenizer, whose last one is {num_tokens - 1}"
                )


def _fill(template: str, values: Mapping[str, str]) -> str:
    return "".join(
        literal + (values[name] if name is not None else "")
        for literal, name, _, _ in string.Formatter().parse(template)
    )


def _column_text(fields: Mapping[str, Any], name: str) -> str:
    try:
        value = look_up(fields, name)
    except KeyError:
        raise RowError(f"the row has no column {name!r}") from None
    if value is None:
        raise RowError(f"column {name!r} is empty")
    if isinstance(value, str):
        return value
    if isinstance(value, (bool, int, float)):
        return json.dumps(value)
    raise RowError(f"column {name!r} must hold text, got {short(value)}")


_read_priority = integer(-INT64, INT64)


def _priority(value: Any) -> int:
    return 0 if value is None else int(_read_priority("priority", value))

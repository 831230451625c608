"""From a row to a request: its prompt as token ids, its parameters, its random key.

Whatever is wrong with a row is a `RowError` that says what and lets the others go on.
"""

from __future__ import annotations

import json
import string
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from pagedbatch.constraint import Constraint
from pagedbatch.constraints.build import ConstraintBuilder, ConstraintSource, fit_to_constraint
from pagedbatch.constraints.thinking_tags import ThinkingRules
from pagedbatch.errors import ParamError, RowError, UsageError
from pagedbatch.input.chat.messages import checked_messages
from pagedbatch.input.chat.options import ChatOptions, refuse_chat_options
from pagedbatch.input.chat.template import ChatTemplate
from pagedbatch.input.fields.field_table import PLACE_FIELDS, PROMPT_FIELDS
from pagedbatch.input.row import Row, id_hash, look_up
from pagedbatch.input.source_encoder import SourceEncoder, SourceLimits
from pagedbatch.input.tokenize import PromptEncoder
from pagedbatch.params import READERS, GenerationParams, resolve
from pagedbatch.readers import INT64, BadWord, integer
from pagedbatch.sequence import Request
from pagedbatch.wording import short


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What prompts, parameters and constraints are checked against."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int] = frozenset()
    num_token_ids: int | None = None
    """Ids from here on are no tokens; None: all of the vocabulary are."""
    source: SourceLimits | None = None
    """None: the model is a decoder alone."""

    @property
    def num_tokens(self) -> int:
        return self.vocab_size if self.num_token_ids is None else self.num_token_ids


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
    whole run, as is `run_constraint`. A row's own win.
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
        template: ChatTemplate | None = None,
        run_constraint: ConstraintSource | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._chat = chat
        self._chat_template = template or ChatTemplate(tokenizer, now=datetime.now())
        self._encoder = PromptEncoder(
            tokenizer,
            self._chat_template,
            limit=limits.max_model_len if limits.source is None else limits.source.max_tokens,
            chat=chat,
            eos_token_ids=limits.eos_token_ids,
            keeps_end=limits.source is not None,
        )
        self._sources: SourceEncoder | None = None
        if limits.source is not None:
            asked = frozenset(name for name, value in run_settings.items() if value is not None)
            self._sources = SourceEncoder(tokenizer, limits.source, defaults=model_defaults, asked=asked)
        self._limits = limits
        self._model_defaults = model_defaults
        self._run_settings = run_settings
        self._prompt_column = prompt_column
        self._prompt_template = prompt_template
        self._template_fields = template_fields(prompt_template) if prompt_template is not None else ()
        eos_token_ids = frozenset(i for i in limits.eos_token_ids if i < limits.vocab_size)
        self._thinking = ThinkingRules(tokenizer, limits.vocab_size, eos_token_ids)
        used = {*self._template_fields, *([] if prompt_column is None else [prompt_column])}
        self._data_columns = (used | {name.partition(".")[0] for name in used}) - READERS.keys() - {*PLACE_FIELDS}
        self.constraints = ConstraintBuilder(
            tokenizer, limits.vocab_size, limits.eos_token_ids, run_constraint, num_tokens=limits.num_tokens
        )

    @property
    def date(self) -> str | None:
        """The day that the chat template writes into prompts; None where it writes none."""
        return self._chat_template.date

    def request(self, row: Row) -> Request:
        """The request of a row.

        Raises:
            RowError: the row can't be answered.
        """
        if row.error is not None:
            raise RowError(row.error)
        assert row.id is not None
        try:
            fields = row.asked(self._data_columns)  # columns that make its prompt are data, but for our own parameters
            params = self.resolve_params(fields)
            if self._sources is None:
                whole = self._prompt_token_ids(row, fields, params)
                kept, source = self._encoder.truncate(whole, params), list[int]()
                prompt = kept
            else:
                whole = self._source_token_ids(row, fields, params, self._sources)
                kept = source = self._sources.truncate(whole, params)
                target = self._sources.target(fields, params, len(source))
                self._sources.check_token_ids("decoder_prompt", target.token_ids, self._limits.vocab_size)
                prompt, params = target.token_ids, target.params
                self._check_embedded(source, self._sources.vocab_size)
            self._check_embedded(prompt, self._limits.vocab_size)
            priority = _priority(fields.get("priority"))
            params = self._fit(params, len(prompt))
            thinking = self._thinking.part(prompt, params, is_chat=self._is_chat(fields))
            constraint = self._thinking.constraint(thinking, params, lambda own: self.constraint(fields, own))
            if constraint is not None and params.thinking_budget is None:
                thinking = None  # it holds the output from its first token on: that is the answer
            params = fit_to_constraint(params, constraint)
        except RowError as error:
            raise RowError(f"{row.place}: {error}") from None
        except RecursionError:
            raise RowError(f"{row.place}: it holds values that are nested too deeply") from None
        num_truncated = len(whole) - len(kept)
        rng_key = id_hash(row.id, params.seed)
        return Request(row.index, prompt, params, rng_key, priority, constraint, num_truncated, thinking, source)

    def _source_token_ids(
        self, row: Row, fields: Mapping[str, Any], params: GenerationParams, sources: SourceEncoder
    ) -> list[int]:
        """What the encoder reads."""
        if fields.get("messages") is not None:
            raise RowError("messages: this model is an encoder-decoder, which has no chat; give prompt")
        if fields.get("prompt_token_ids") is not None:
            return self._prompt_token_ids(row, fields, params)
        return sources.source(lambda: self._prompt_token_ids(row, fields, params), params)

    def constraint(self, fields: Mapping[str, Any], params: GenerationParams) -> Constraint | None:
        """What a row's outputs must obey: its own constraint, else the run's.

        Raises:
            RowError: it is malformed, can't be met, or can't be combined with a parameter.
        """
        return self.constraints.constraint(fields, params)

    def resolve_params(self, fields: Mapping[str, Any]) -> GenerationParams:
        """A row's parameters: its own, as `read_fields` gives them, over the run's over the model's.

        Raises:
            ParamError: a wrong type or value, or two that can't be combined.
        """
        own = {name: fields[name] for name in READERS if fields.get(name) is not None}
        if (samples := fields.get("do_sample")) is not None:
            own |= self._temperature(own) if samples else {"temperature": 0.0}
        params = resolve(self._model_defaults, self._run_settings, own)
        if params.bad_words:
            params = replace(params, bad_words=self._encoded(params.bad_words))
        for name, token_ids in (
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", [token_id for token_id, _ in params.logit_bias]),
            ("bad_words", [token_id for word in params.bad_words_ids for token_id in word]),
            ("allowed_token_ids", params.allowed_token_ids),
            ("forced_bos_token_id", _given(params.forced_bos_token_id)),
            ("forced_eos_token_id", _given(params.forced_eos_token_id)),
        ):
            self._check_vocabulary(name, token_ids)
        self._thinking.check_budget(params)
        self._check_source_params(fields, params)
        return params

    def _check_source_params(self, fields: Mapping[str, Any], params: GenerationParams) -> None:
        """What only an encoder-decoder takes."""
        if self._sources is not None:
            self._sources.check(params)
            return
        named = {name: getattr(params, name) for name in ("source_lang", "target_lang", "max_tokens_per_source_token")}
        for name, value in (named | {"decoder_prompt": fields.get("decoder_prompt")}).items():
            if value is not None:
                raise ParamError(f"{name}: this model is no encoder-decoder, so that a row has no source")

    def _temperature(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """What `do_sample` true adds to the parameters of a row that gives no temperature."""
        num_beams = own.get("num_beams", self._run_settings.get("num_beams"))
        if isinstance(num_beams, int) and num_beams > 1:
            raise ParamError(f"do_sample true can't be combined with num_beams {num_beams}: beams don't sample")
        lower = self._run_settings.get("temperature", self._model_defaults.get("temperature"))
        return {} if lower else {"temperature": 1.0}

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

    def _prompt_token_ids(self, row: Row, fields: Mapping[str, Any], params: GenerationParams) -> list[int]:
        if self._prompt_column is not None:
            return self._encode(_column_text(row.columns(fields), self._prompt_column), fields, params)
        if self._prompt_template is not None:
            columns = row.columns(fields)
            values = {name: _column_text(columns, name) for name in self._template_fields}
            return self._encode(_fill(self._prompt_template, values), fields, params)
        given = [name for name in PROMPT_FIELDS if fields.get(name) is not None]
        if not given:
            raise RowError("no prompt: the row needs prompt, messages or prompt_token_ids")
        if len(given) > 1:
            raise RowError(f"{' and '.join(given)} are given: a row takes one of them")
        value = fields[given[0]]
        if given[0] == "prompt_token_ids":
            refuse_chat_options(fields)
            return self._checked_token_ids(value)
        if given[0] == "messages":
            return self._encoder.encode_messages(checked_messages(value), params, ChatOptions.read(fields, params))
        if not isinstance(value, str):
            raise RowError(f"prompt must be text, got {short(value)}")
        return self._encode(value, fields, params)

    def _encode(self, text: str, fields: Mapping[str, Any], params: GenerationParams) -> list[int]:
        """A prompt that was given as text."""
        if self._sources is not None:
            text = self._sources.prefixed(text, params)
        if not self._encoder.wraps_texts:
            refuse_chat_options(fields)
        return self._encoder.encode_text(text, params, ChatOptions.read(fields, params))

    def _is_chat(self, fields: Mapping[str, Any]) -> bool:
        """Whether the chat template makes the row's prompt."""
        if self._prompt_column is not None or self._prompt_template is not None or fields.get("prompt") is not None:
            return self._chat
        return fields.get("messages") is not None

    def _checked_token_ids(self, value: Any) -> list[int]:
        if not isinstance(value, list) or not all(type(token_id) is int for token_id in value):
            raise RowError(f"prompt_token_ids must be a list of integers, got {short(value)}")
        if self._sources is None:
            self._check_vocabulary("prompt_token_ids", value)
        else:
            self._sources.check_token_ids("prompt_token_ids", value, self._sources.vocab_size)
        return list(value)

    def _check_embedded(self, token_ids: list[int], size: int) -> None:
        """Refuses a prompt with a token that the tokenizer has and the model, of `size` embeddings, has not."""
        if token_ids and max(token_ids) >= size:
            token_id = max(token_ids)
            token = self._tokenizer.convert_ids_to_tokens(token_id)
            raise RowError(
                f"the prompt holds {token!r}, token id {token_id}, which this model lacks: its embedding table has "
                f"{size} rows"
            )

    def _check_vocabulary(self, name: str, token_ids: Any) -> None:
        size, num_tokens = self._limits.vocab_size, self._limits.num_tokens
        for token_id in token_ids:
            if not 0 <= token_id < size:
                raise ParamError(f"{name}: {token_id} is no token id of this model, whose vocabulary has {size}")
            if token_id >= num_tokens:
                raise ParamError(
                    f"{name}: {token_id} is no token of this model's tokenizer, whose last one is {num_tokens - 1}: "
                    "ids above it are padding"
                )


def _given(token_id: int | None) -> list[int]:
    return [] if token_id is None else [token_id]


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

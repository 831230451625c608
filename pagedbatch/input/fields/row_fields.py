"""Reads the options of a row, whatever tool's names it uses, into fields of ours.

Of a plain row, keys that the table does not know are data. In the body of an OpenAI batch row, and in an object of
options, every key must mean something, and one that can't be had is the row's error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedbatch.constraint import CONSTRAINT_FIELDS
from pagedbatch.errors import RowError
from pagedbatch.input.fields import field_forms as forms
from pagedbatch.input.fields.field_table import (
    BUNDLES,
    CHAT_FIELDS,
    HARMLESS,
    LACKED,
    OPTIONS,
    PROMPT_FIELDS,
    SYNONYMS,
    TARGET_FIELDS,
    asks_nothing,
)
from pagedbatch.input.fields.near_names import nearest_option
from pagedbatch.params import READERS
from pagedbatch.wording import short

#: What a row may say beside options.
_BESIDE = frozenset({*PROMPT_FIELDS, *TARGET_FIELDS, "priority"})
_MAX_NAME_LENGTH = 60


def read_fields(given: Mapping[str, Any], *, strict: bool = False, prefix: str = "") -> dict[str, Any]:
    """The prompt and the options of a row, by our names alone; null is not given.

    Beside our own names there may be `do_sample`, whose meaning depends on the run's temperature.

    Args:
        strict: a key without a meaning is an error; else it is data, and left out.
        prefix: where the keys stand, for messages: `body.`.

    Raises:
        RowError: a value has a wrong type, two keys contradict each other, or something can't be had.
    """
    reading = _Reading()
    reading.take(given, prefix, strict=strict, beside=_BESIDE)
    return reading.finish()


class _Reading:
    """Fields as they are found. `_said` is the key that gave each, as the user wrote it."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._said: dict[str, str] = {}
        self._kwargs: dict[str, Any] = {}
        self._kwargs_said: dict[str, str] = {}

    def take(self, given: Mapping[str, Any], prefix: str, *, strict: bool, beside: frozenset[str]) -> None:
        for name, value in given.items():
            if value is None:
                continue
            if name in beside:
                self._values[name] = value
                continue
            try:
                self._take_option(name, value, f"{prefix}{_shown(name)}", strict=strict, in_bundle=not beside)
            except RowError as error:
                hint = "" if strict or name in READERS else f" (--ignore-columns {_shown(name)}, if the column is data)"
                raise RowError(f"{error}{hint}") from None

    def _take_option(self, name: str, value: Any, said: str, *, strict: bool, in_bundle: bool) -> None:
        if name in OPTIONS:
            self._put_all(_own(name, said, value, strict=strict), said)
        elif name in SYNONYMS and (strict or SYNONYMS[name].takes(value)):
            self._put_all(SYNONYMS[name].read(said, value), said)
        elif name in BUNDLES and not in_bundle and (strict or BUNDLES[name](value)):
            bundle = forms.structure(said, value, Mapping)
            self.take(bundle, f"{said}.", strict=True, beside=frozenset())
        elif strict and name not in HARMLESS:
            _refuse(name, said, value)

    def finish(self) -> dict[str, Any]:
        """All that was found, once it is known not to contradict itself."""
        values = self._values
        self._settle_logprobs()
        self._settle_tools()
        self._settle_sampling()
        constraints = [self._said[name] for name in CONSTRAINT_FIELDS if name in values]
        if len(constraints) > 1:
            raise RowError(f"{' and '.join(constraints)} are given: a row takes one of them")
        if self._kwargs:
            values["chat_template_kwargs"] = self._kwargs
        return values

    def _put_all(self, fields: forms.Fields, said: str) -> None:
        for name, value in fields.items():
            if name == "chat_template_kwargs":
                for key, part in value.items():
                    inner = f"{said}.{_shown(key)}" if said.endswith(name) else said
                    _put(self._kwargs, self._kwargs_said, key, part, inner)
            else:
                _put(self._values, self._said, name, value, said)

    def _settle_logprobs(self) -> None:
        """True asks for as many as `top_logprobs` says, and for none beside the token's own where it says nothing."""
        wanted, top = self._values.get("logprobs"), self._values.pop("top_logprobs", None)
        if wanted is True:
            self._values["logprobs"] = top or 0
        elif top and wanted is not None and wanted is not False and wanted != top:
            raise RowError(f"{self._said['logprobs']} and {self._said['top_logprobs']} contradict each other: give one")
        elif top and not wanted:
            raise RowError(f"{self._said['top_logprobs']} needs logprobs true beside it")

    def _settle_tools(self) -> None:
        """Without a parser of tool calls nothing can be enforced, but tools can be left out."""
        choice = self._values.pop("tool_choice", "auto")
        if choice == "none":
            self._values.pop("tools", None)
        elif choice != "auto":
            said = self._said["tool_choice"]
            raise RowError(f"{said} = {short(choice)} is not supported: a call can't be enforced, take auto or none")

    def _settle_sampling(self) -> None:
        samples, temperature = self._values.get("do_sample"), self._values.get("temperature")
        if samples is None or temperature is None:
            return
        if samples != (READERS["temperature"](self._said["temperature"], temperature) > 0):
            said, other = self._said["do_sample"], self._said["temperature"]
            raise RowError(
                f"{said} {str(samples).lower()} and {other} {short(temperature)} contradict each other: give one"
            )
        del self._values["do_sample"]


def _shown(name: str) -> str:
    """A key as it stands, unless it is long or holds what a terminal would act upon."""
    return name if name.isprintable() and len(name) <= _MAX_NAME_LENGTH else short(name)


def _own(name: str, said: str, value: Any, *, strict: bool) -> forms.Fields:
    """The fields that an option of ours gives. Some also take a form that another tool knows under the same name."""
    if name == "logprobs":
        return {name: value if isinstance(value, bool) else READERS[name](said, value)}
    if name == "grammar":
        return forms.grammar(said, value)
    if name == "allowed_outputs":
        return forms.choices(said, value)
    if name == "tools":
        tools = [] if value == {} else forms.object_list(said, value)
        return {name: tools} if tools else {}
    if name == "documents":
        if not strict and not forms.is_object_list(value):
            return {}
        return {name: forms.object_list(said, value)}
    if name == "chat_template_kwargs":
        return {name: forms.structure(said, value, Mapping)}
    if name in CHAT_FIELDS:
        return {name: forms.boolean(said, value)}
    return forms.renamed(name)(said, value)


def _put(values: dict[str, Any], names: dict[str, str], name: str, value: Any, said: str) -> None:
    """Enters a value. What two keys of a row say of one thing must be the same."""
    if name in values and _read(name, value, said) != _read(name, values[name], names[name]):
        raise RowError(f"{names[name]} and {said} contradict each other: give one")
    values[name], names[name] = value, said


def _read(name: str, value: Any, said: str) -> Any:
    return READERS[name](said, value) if name in READERS and value is not True else value


def _refuse(name: str, said: str, value: Any) -> None:
    """Raises a `RowError` where a key that can't be had asks for something."""
    lacked = LACKED.get(name)
    if asks_nothing(value) or (lacked is not None and lacked.is_neutral(value)):
        return
    message = f"{said} = {short(value)} is not supported"
    if lacked is not None and lacked.instead:
        raise RowError(f"{message}: here there is {lacked.instead}")
    near = nearest_option(name)
    raise RowError(message if near is None else f"{message}: did you mean {near}?")

"""Which constraint a row has: its own, or the run's.

What is wrong with a constraint is a `RowError`; who reads the run's own makes it a `UsageError`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedbatch.constraint import CONSTRAINT_FIELDS, Constraint
from pagedbatch.constraints.catalog_source import CatalogEncoder, Item, check_items, read_catalog
from pagedbatch.constraints.json_schema import unheld_part
from pagedbatch.errors import RowError, UsageError
from pagedbatch.params import GenerationParams
from pagedbatch.preparation_steps import not_counted, step
from pagedbatch.wording import short

if TYPE_CHECKING:
    from pagedbatch.constraints.catalog import TokenTrie
    from pagedbatch.constraints.grammar import CompiledGrammar, GrammarCompiler, GrammarKind, PackedGrammar
    from pagedbatch.settings import RunSettings

#: Tries of rows that are kept: rows that list the same outputs share one.
_MAX_TRIES = 64


@dataclass(frozen=True, slots=True)
class CatalogSource:
    """A catalog as it was given. `name` is how messages call it."""

    items: list[Item]
    name: str

    @property
    def fingerprint(self) -> str:
        """The same for the same items, whatever file they came from."""
        return _fingerprint("catalog", self.items)


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A JSON schema, a regular expression or a grammar as it was given. `name` is how messages call it."""

    kind: GrammarKind
    text: str
    name: str

    @property
    def fingerprint(self) -> str:
        """The same for the same text, whatever file it came from."""
        return _fingerprint(self.kind, self.text)


ConstraintSource = CatalogSource | GrammarSource


def _fingerprint(kind: str, value: list[Item] | str) -> str:
    return f"{kind} {hashlib.blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()}"


def read_run_constraint(settings: RunSettings) -> ConstraintSource | None:
    """The constraint of the whole run, its file read.

    Raises:
        UsageError: the file can't be read, or the schema is not JSON.
    """
    if settings.constrain_to is not None:
        return CatalogSource(read_catalog(settings.constrain_to), f"--constrain-to {settings.constrain_to}")
    if settings.json_schema is not None:
        schema = settings.json_schema
        if isinstance(schema, str) and not schema.lstrip().startswith("{"):
            schema = _read_text("--json-schema", schema)
        try:
            return _schema_source(schema, "--json-schema")
        except RowError as error:
            raise UsageError(str(error)) from None
    if settings.regex is not None:
        return GrammarSource("regex", settings.regex, "--regex")
    if settings.grammar is not None:
        return GrammarSource("grammar", _read_text("--grammar", settings.grammar), "--grammar")
    return None


def _read_text(flag: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"{flag} {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{flag} {path}: not UTF-8 text") from None


def _row_source(fields: Mapping[str, Any]) -> ConstraintSource | None:
    given = [name for name in CONSTRAINT_FIELDS if fields.get(name) is not None]
    if not given:
        return None
    if len(given) > 1:
        raise RowError(f"{' and '.join(given)} are given: a row takes one of them")
    name, value = given[0], fields[given[0]]
    if name == "allowed_outputs":
        return CatalogSource(check_items(value), name)
    if name == "json_schema":
        return _schema_source(value, name)
    if not isinstance(value, str) or not value:
        raise RowError(f"{name} must be a non-empty text, got {short(value)}")
    return GrammarSource("regex" if name == "regex" else "grammar", value, name)


def _schema_source(value: Any, name: str) -> GrammarSource:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RowError(f"{name}: malformed JSON: {error}") from None
    if not isinstance(value, (Mapping, bool)):
        raise RowError(f"{name} must be a JSON schema, got {short(value)}")
    try:
        problem, text = unheld_part(value), json.dumps(value)
    except RecursionError:
        raise RowError(f"{name} is nested too deep") from None
    except TypeError as error:  # a table's bytes or dates, or what is no schema
        raise RowError(f"{name} must be a JSON schema: {error}") from None
    if problem is not None:
        raise RowError(f"{name}: outputs can't be held to {problem}")
    return GrammarSource("json_schema", text, name)


def fit_to_constraint(params: GenerationParams, constraint: Constraint | None) -> GenerationParams:
    """The parameters of a row with this constraint.

    Where the constraint is a catalog, no blocks are kept for what can't come, and an item comes once, whatever its end.
    """
    if constraint is None or constraint.max_tokens is None:
        return params
    return replace(params, max_tokens=constraint.max_tokens, merge_end_tokens=True)


class ConstraintBuilder:
    """Makes the constraints of rows. A trie or a grammar is made once for all rows that give the same.

    `num_tokens`: ids from there on only pad the vocabulary.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        run: ConstraintSource | None,
        *,
        num_tokens: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(i for i in eos_token_ids if i < vocab_size)
        self._run = run
        self._encoder = CatalogEncoder(tokenizer, num_tokens or vocab_size, eos_token_ids)
        self._run_trie: TokenTrie | None = None
        self._row_trie = lru_cache(maxsize=_MAX_TRIES)(self._build_row_trie)
        self._compiler: GrammarCompiler | None = None

    def constraint(self, fields: Mapping[str, Any], params: GenerationParams) -> Constraint | None:
        """The constraint of a row with these parameters, if it has one.

        Raises:
            RowError: it is malformed, can't be met, or can't be combined with a parameter.
        """
        source = _row_source(fields) or self._run
        if source is None or params.max_tokens == 0:
            return None
        if params.stop:
            raise RowError(f"{source.name} can't be combined with stop: a text cut at a stop string need not be whole")
        if params.ignore_eos:
            raise RowError(f"{source.name} can't be combined with ignore_eos: an end token closes the output")
        end_token_ids = tuple(sorted(self._eos_token_ids | set(params.stop_token_ids)))
        if not end_token_ids:
            raise RowError(f"{source.name} needs an end token, and this model names none: give stop_token_ids")
        if isinstance(source, CatalogSource):
            return self._catalog(source, end_token_ids, params)
        return self._grammar(source, end_token_ids)

    def _catalog(self, source: CatalogSource, end_token_ids: tuple[int, ...], params: GenerationParams) -> Constraint:
        from pagedbatch.constraints.catalog import CatalogConstraint

        trie = self._trie(source)
        inside = trie.uses_any_of(params.stop_token_ids)
        if inside is not None:
            raise RowError(f"{source.name}: an item holds token {inside}, which stop_token_ids says ends an output")
        max_tokens = min(params.max_tokens, trie.longest_item + 1)
        constraint = CatalogConstraint(trie, end_token_ids, params.min_tokens, max_tokens)
        if not constraint.is_possible:
            raise RowError(
                f"{source.name}: no item fits max_tokens {params.max_tokens} and min_tokens {params.min_tokens}: "
                f"with its end token the shortest takes {trie.shortest_item + 1}"
            )
        return constraint

    def _trie(self, source: CatalogSource) -> TokenTrie:
        if source is not self._run:
            return self._row_trie(tuple(item if isinstance(item, str) else tuple(item) for item in source.items))
        if self._run_trie is None:
            with not_counted():
                self._run_trie = self._encoder.trie(source.items, lambda i: f"{source.name}, line {i + 1}")
        return self._run_trie

    def _build_row_trie(self, items: tuple[str | tuple[int, ...], ...]) -> TokenTrie:
        with step("building the trie of allowed_outputs", f"allowed_outputs {hash(items)}"):
            return self._encoder.trie(
                [item if isinstance(item, str) else list(item) for item in items], lambda i: f"allowed_outputs[{i}]"
            )

    def _grammar(self, source: GrammarSource, end_token_ids: tuple[int, ...]) -> Constraint:
        with step(f"compiling {source.name}", source.fingerprint):
            try:
                return self._grammar_compiler().constraint(source.kind, source.text, end_token_ids)
            except RowError as error:
                raise RowError(f"{source.name}: {error}") from None

    def _grammar_compiler(self) -> GrammarCompiler:
        if self._compiler is None:
            from pagedbatch.constraints.grammar import GrammarCompiler

            with not_counted():
                self._compiler = GrammarCompiler(self._tokenizer, self._vocab_size, self._eos_token_ids)
        return self._compiler

    def run_part(self) -> TokenTrie | CompiledGrammar | None:
        """What was built or compiled of the run's own constraint, if it was."""
        if isinstance(self._run, GrammarSource) and self._compiler is not None:
            return self._compiler.compiled(self._run.kind, self._run.text)
        return self._run_trie

    def pack_grammar(self, compiled: CompiledGrammar) -> PackedGrammar:
        """A compiled grammar for another process that has the same model."""
        with step(f"compiling the {compiled.kind}", _fingerprint(compiled.kind, compiled.text)):
            return self._grammar_compiler().pack(compiled)

    def unpack_grammar(self, packed: PackedGrammar) -> CompiledGrammar:
        """The grammar of `pack_grammar`."""
        return self._grammar_compiler().unpack(packed)

"""JSON schemas, regular expressions and EBNF grammars as constraints, through xgrammar (Dong et al., arXiv 2411.15100).

xgrammar is imported only when a run uses it.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from pagedbatch.constraint import AllowedMask
from pagedbatch.errors import RowError, RunError
from pagedbatch.wording import first_line

GrammarKind = Literal["json_schema", "regex", "grammar"]

#: Compiled grammars that are kept: rows that bring their own often share a few.
_MAX_COMPILED = 256
#: Blanks in a row between the parts of a JSON text: room for a line end and an indent, and no model gets lost in them.
_MAX_WHITESPACE = 10
#: Never inside a JSON string, and between its parts only as blanks: xgrammar lets them into strings of bounded length.
_CONTROL_CHARACTER = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")
#: What xgrammar says when memory is not enough.
_OUT_OF_MEMORY = "bad_alloc"
#: A grammar that took more CPU time than this goes to another process compiled; others are compiled there again, which
#: takes no longer than reading them back would.
_QUICK_SECONDS = 0.05
#: Where in its C++ sources xgrammar found a mistake.
_SOURCE_PLACE = re.compile(r"^\[[\d:]+\] \S+:\d+: ")


@dataclass(frozen=True, slots=True, eq=False)
class CompiledGrammar:
    """A grammar, what xgrammar made of it, and the CPU seconds that it took."""

    kind: GrammarKind
    text: str
    matchable: Any
    cpu_seconds: float


@dataclass(frozen=True, slots=True)
class PackedGrammar:
    """A compiled grammar on its way to another process. `json` None: it is compiled again there."""

    kind: GrammarKind
    text: str
    json: str | None


class GrammarCompiler:
    """Compiles grammars for one model's vocabulary, each distinct one once."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """
        Raises:
            RowError: xgrammar is not installed, or can't read this tokenizer's vocabulary.
        """
        try:
            import xgrammar
        except ImportError:
            hint = "pip install 'pagedbatch[grammar]'"
            raise RowError(f"JSON schemas, regexes and grammars need xgrammar: {hint}") from None
        ends = sorted(eos_token_ids)
        try:
            vocabulary = xgrammar.TokenizerInfo.from_huggingface(
                tokenizer, vocab_size=vocab_size, stop_token_ids=ends or None
            )
        except (RuntimeError, ValueError, TypeError) as error:
            raise RowError(f"xgrammar can't read this model's vocabulary: {_reason(error)}") from None
        self._vocabulary = vocabulary
        self._deserialize = xgrammar.CompiledGrammar.deserialize_json
        self._compiler = xgrammar.GrammarCompiler(
            vocabulary, max_threads=min(8, os.cpu_count() or 1), cache_enabled=False
        )
        self._new_matcher = xgrammar.GrammarMatcher
        self._vocab_size = vocab_size
        # Their text would count for the grammar, and is left out of the output.
        added = tokenizer.added_tokens_decoder.items()
        special = {*tokenizer.all_special_ids, *ends, *(i for i, token in added if token.special)}
        self._special_ids = [i for i in special if i < vocab_size]
        self._control_ids = [i for i, text in enumerate(vocabulary.decoded_vocab) if _CONTROL_CHARACTER.search(text)]
        self.compiled = lru_cache(maxsize=_MAX_COMPILED)(self._compile)

    def constraint(self, kind: GrammarKind, text: str, end_token_ids: tuple[int, ...]) -> GrammarConstraint:
        """The constraint of a grammar: outputs are texts of it and then one of `end_token_ids`.

        Args:
            kind: what `text` is: a JSON schema, a regular expression, or a grammar in EBNF whose first rule is `root`.
            text: the grammar.
            end_token_ids: below the vocabulary's size; they are no text.

        Raises:
            RowError: the grammar is malformed, asks what xgrammar does not have, or allows no text at all.
        """
        is_text = np.ones(self._vocab_size, bool)
        is_text[[*self._special_ids, *end_token_ids]] = False
        if kind == "json_schema":
            is_text[self._control_ids] = False
        is_end = np.zeros(self._vocab_size, bool)
        is_end[list(end_token_ids)] = True
        constraint = GrammarConstraint(
            new_matcher=self._new_matcher,
            compiled=self.compiled(kind, text),
            text_words=_pack_bits(is_text),
            end_words=_pack_bits(is_end),
        )
        if not constraint.start().allowed().words.any():
            raise RowError("it allows no output at all")
        return constraint

    def pack(self, compiled: CompiledGrammar) -> PackedGrammar:
        """For `unpack` in another process.

        Raises:
            MemoryError: it is too large.
        """
        json = None
        if compiled.cpu_seconds > _QUICK_SECONDS:
            try:
                json = compiled.matchable.serialize_json()
            except RuntimeError as error:
                raise MemoryError(_reason(error)) from None
        return PackedGrammar(compiled.kind, compiled.text, json)

    def unpack(self, packed: PackedGrammar) -> CompiledGrammar:
        """What `pack` was given, for the same vocabulary."""
        if packed.json is None:
            return self.compiled(packed.kind, packed.text)
        return CompiledGrammar(packed.kind, packed.text, self._deserialize(packed.json, self._vocabulary), 0.0)

    def _compile(self, kind: GrammarKind, text: str) -> CompiledGrammar:
        began = time.process_time()
        try:
            if kind == "json_schema":
                matchable = self._compiler.compile_json_schema(text, max_whitespace_cnt=_MAX_WHITESPACE)
            elif kind == "regex":
                matchable = self._compiler.compile_regex(text)
            else:
                matchable = self._compiler.compile_grammar(text)
        except (RuntimeError, ValueError, TypeError) as error:
            if _OUT_OF_MEMORY in str(error):
                raise MemoryError from None
            raise RowError(_reason(error)) from None
        return CompiledGrammar(kind, text, matchable, time.process_time() - began)


def _reason(error: Exception) -> str:
    return _SOURCE_PLACE.sub("", first_line(error))


def _pack_bits(flags: np.ndarray) -> np.ndarray:
    """A bit for each of `flags`, as in `AllowedMask`."""
    padded = np.zeros(-(-len(flags) // 32) * 32, bool)
    padded[: len(flags)] = flags
    return np.packbits(padded, bitorder="little").view("<i4")


@dataclass(frozen=True, slots=True, eq=False)
class GrammarConstraint:
    """A compiled grammar. `text_words` and `end_words` are the tokens that are text and those that end an output."""

    new_matcher: Callable[[Any], Any]
    compiled: CompiledGrammar
    text_words: np.ndarray
    end_words: np.ndarray

    @property
    def max_tokens(self) -> None:
        return None

    def start(self) -> GrammarState:
        return GrammarState(self, self.new_matcher(self.compiled.matchable))


@dataclass(slots=True)
class GrammarState:
    """A sequence's matcher. A fork copies the matcher's state; the compiled grammar is shared."""

    constraint: GrammarConstraint
    matcher: Any

    def allowed(self) -> AllowedMask:
        words = np.zeros((1, len(self.constraint.text_words)), np.int32)
        self.matcher.fill_next_token_bitmask(words)
        allowed = words[0] & self.constraint.text_words
        # Not left to xgrammar: it would let a token that is also text end an output in its middle.
        if self.matcher.is_completed():
            allowed |= self.constraint.end_words
        return AllowedMask(allowed)

    def advance(self, token_id: int) -> None:
        if not self.matcher.accept_token(token_id):
            raise RunError(f"token {token_id} was drawn, but the grammar does not allow it here: a bug")

    def fork(self) -> GrammarState:
        return GrammarState(self.constraint, self.matcher.fork())

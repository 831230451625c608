"""Catalogs of allowed outputs, from a file or a row, as token ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedbatch.errors import RowError, UsageError
from pagedbatch.readers import is_unicode
from pagedbatch.wording import short

if TYPE_CHECKING:
    from pagedbatch.constraints.catalog import TokenTrie

#: A text, or the token ids of one.
Item = str | list[int]

_ITEMS_AT_ONCE = 10_000


def read_catalog(path: str) -> list[Item]:
    """The items of a catalog file, a line each: a JSON list of token ids, or else text. Blank lines are kept, empty.

    Raises:
        UsageError: no such file, not UTF-8, or no item in it.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"--constrain-to {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"--constrain-to {path}: not UTF-8 text") from None
    items = [_read_line(line.removesuffix("\r")) for line in text.split("\n")]
    if not any(items):
        raise UsageError(f"--constrain-to {path}: no item in it")
    return items


def _read_line(line: str) -> Item:
    if line.startswith("["):
        try:
            value = json.loads(line)
        except ValueError:
            return line
        if isinstance(value, list) and value and all(type(entry) is int for entry in value):
            return value
    return line


def check_items(value: Any) -> list[Item]:
    """A row's `allowed_outputs`.

    Raises:
        RowError: it is not a list of texts and lists of token ids, or one of them is empty.
    """
    if not isinstance(value, list) or not value:
        raise RowError(f"allowed_outputs must be a list of at least one output, got {short(value)}")
    for i, item in enumerate(value):
        is_ids = isinstance(item, list) and all(type(entry) is int for entry in item)
        if not item or not (isinstance(item, str) or is_ids):
            raise RowError(f"allowed_outputs[{i}] must be a text or a list of token ids, not empty, got {short(item)}")
    return value


class CatalogEncoder:
    """Makes tries of items, with a Hugging Face tokenizer. Texts are encoded without added special tokens."""

    def __init__(self, tokenizer: Any, num_tokens: int, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._num_tokens = num_tokens
        self._eos_token_ids = eos_token_ids

    def trie(self, items: Sequence[Item], place: Callable[[int], str]) -> TokenTrie:
        """The trie of the items that are not empty. `place` names an item by its number, for messages.

        Raises:
            RowError: an item has a token that the model lacks, or one that ends an output.
        """
        from pagedbatch.constraints.catalog import TokenTrie

        return TokenTrie.build(self._packed(items, place))

    def _packed(self, items: Sequence[Item], place: Callable[[int], str]) -> Iterator[bytes]:
        from pagedbatch.constraints.catalog import pack

        for start in range(0, len(items), _ITEMS_AT_ONCE):
            chunk = items[start : start + _ITEMS_AT_ONCE]
            encoded = self._encode([item for item in chunk if isinstance(item, str)])
            for i, item in enumerate(chunk, start):
                token_ids = next(encoded) if isinstance(item, str) else item
                if not item:
                    continue
                is_known = bool(token_ids) and min(token_ids) >= 0 and max(token_ids) < self._num_tokens
                if not is_known or not self._never_inside.isdisjoint(token_ids):
                    raise RowError(f"{place(i)}: {self._problem(item, token_ids)}")
                yield pack(token_ids)

    def _encode(self, texts: list[str]) -> Iterator[list[int]]:
        """Token ids of each text; none where it is no Unicode."""
        readable = [text if is_unicode(text) else "" for text in texts]
        return iter(self._tokenizer(readable, add_special_tokens=False)["input_ids"] if readable else [])

    def _problem(self, item: Item, token_ids: list[int]) -> str:
        if not token_ids or self._unknown_id in token_ids:
            return f"this model has no tokens for {short(item)}"
        for token_id in token_ids:
            if token_id in self._eos_token_ids:
                return f"{short(item)} holds the end token {token_id}: leave it out, one follows every item by itself"
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < self._num_tokens)
        return f"{wrong} is no token id of this model, whose last one is {self._num_tokens - 1}"

    @cached_property
    def _never_inside(self) -> frozenset[int]:
        """Tokens that no item may hold."""
        return self._eos_token_ids if self._unknown_id is None else self._eos_token_ids | {self._unknown_id}

    @cached_property
    def _unknown_id(self) -> int | None:
        """The token that stands for what the vocabulary does not have."""
        model = getattr(getattr(self._tokenizer, "backend_tokenizer", None), "model", None)
        name = getattr(model, "unk_token", None) or self._tokenizer.unk_token
        unknown_id: int | None = None if name is None else self._tokenizer.convert_tokens_to_ids(name)
        return unknown_id

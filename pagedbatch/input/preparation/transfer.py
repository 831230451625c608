"""Requests on their way from the preparing process to its parent.

What many rows share, parameters, a trie or a compiled grammar, crosses once: both sides keep the same ones, in the
same order of use, and let the same ones go. Those of the run's own constraint are there on both sides from the start.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import fields
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar

from pagedbatch.params import GenerationParams
from pagedbatch.sequence import Request

Part = TypeVar("Part")

_RUN_KEY = 0
_MAX_TRIES = 64
_MAX_GRAMMARS = 256
_MAX_PARAMS = 16
_OUT_OF_STEP = "the two sides let go of different parts"
_NAMES = tuple(field.name for field in fields(Request))
_values = attrgetter(*_NAMES)


class GrammarPacker(Protocol):
    """Makes bytes of compiled grammars, and grammars of such bytes."""

    def pack_grammar(self, compiled: Any) -> Any: ...

    def unpack_grammar(self, packed: Any) -> Any: ...


class _Recent(Generic[Part]):
    """Parts by number, those used last; the oldest goes when there are too many."""

    def __init__(self, max_parts: int) -> None:
        self._max_parts = max_parts
        self._parts: OrderedDict[int, Part] = OrderedDict()

    def use(self, key: int) -> Part | None:
        part = self._parts.get(key)
        if part is not None:
            self._parts.move_to_end(key)
        return part

    def add(self, key: int, part: Part) -> Part | None:
        """Keeps a part; what had to go for it is returned."""
        self._parts[key] = part
        return self._parts.popitem(last=False)[1] if len(self._parts) > self._max_parts else None


class RequestSender:
    """The preparing process's side. `run_part` is the trie or compiled grammar of the run's own constraint."""

    def __init__(self, run_part: Any, packer: GrammarPacker) -> None:
        self._packer = packer
        self._run_part = run_part
        self._keys: dict[int, int] = {}  # of the parts that the parent has, by identity
        self._num_sent = 0
        self._params: dict[GenerationParams, int] = {}  # those that the parent has
        self._recent_params: _Recent[GenerationParams] = _Recent(_MAX_PARAMS)
        self._tries: _Recent[Any] = _Recent(_MAX_TRIES)
        self._grammars: _Recent[Any] = _Recent(_MAX_GRAMMARS)

    def dumps(self, request: Request) -> bytes:
        """The request as bytes."""
        values = dict(zip(_NAMES, _values(request), strict=True))
        values["params"] = self._params_number(request.params)
        if request.constraint is None:
            return pickle.dumps(values, pickle.HIGHEST_PROTOCOL)
        file = io.BytesIO()
        _Pickler(file, self).dump(values)
        return file.getvalue()

    def trie(self, part: Any) -> tuple[int, Any]:
        """The number of a trie and, where the parent does not have it yet, the trie."""
        return self._number(part, self._tries, lambda trie: _fields(trie))

    def grammar(self, part: Any) -> tuple[int, Any]:
        """The same of a compiled grammar."""
        return self._number(part, self._grammars, self._packer.pack_grammar)

    def _params_number(self, params: GenerationParams) -> tuple[int, GenerationParams | None]:
        """Most rows have the parameters of another one."""
        key = self._params.get(params)
        if key is not None and self._recent_params.use(key) is not None:
            return key, None
        self._num_sent += 1
        self._params[params] = self._num_sent
        gone = self._recent_params.add(self._num_sent, params)
        if gone is not None:
            del self._params[gone]
        return self._num_sent, params

    def _number(self, part: Any, recent: _Recent[Any], pack: Callable[[Any], Any]) -> tuple[int, Any]:
        if part is self._run_part:
            return _RUN_KEY, None
        key = self._keys.get(id(part))
        if key is not None and recent.use(key) is not None:
            return key, None
        packed = pack(part)
        self._num_sent += 1
        self._keys[id(part)] = self._num_sent
        gone = recent.add(self._num_sent, part)
        if gone is not None:
            del self._keys[id(gone)]
        return self._num_sent, packed


class RequestReceiver:
    """The parent's side, for one preparing process."""

    def __init__(self, run_part: Any, packer: GrammarPacker) -> None:
        self._packer = packer
        self._run_part = run_part
        self._params: _Recent[GenerationParams] = _Recent(_MAX_PARAMS)
        self._tries: _Recent[Any] = _Recent(_MAX_TRIES)
        self._grammars: _Recent[Any] = _Recent(_MAX_GRAMMARS)

    def loads(self, payload: bytes) -> Request:
        """The request of such bytes, which are to be given in the order in which they were made."""
        values: dict[str, Any] = _Unpickler(io.BytesIO(payload), self).load()
        key, params = values["params"]
        if params is None:
            params = self._params.use(key)
            assert params is not None, _OUT_OF_STEP
        else:
            self._params.add(key, params)
        return Request(**{**values, "params": params})

    def trie(self, key: int, packed: Any) -> Any:
        from pagedbatch.constraints.catalog import TokenTrie

        return self._part(key, packed, self._tries, lambda fields: TokenTrie(*fields))

    def grammar(self, key: int, packed: Any) -> Any:
        return self._part(key, packed, self._grammars, self._packer.unpack_grammar)

    def _part(self, key: int, packed: Any, recent: _Recent[Any], unpack: Callable[[Any], Any]) -> Any:
        if key == _RUN_KEY:
            return self._run_part
        if packed is None:
            part = recent.use(key)
            assert part is not None, _OUT_OF_STEP
            return part
        part = unpack(packed)
        recent.add(key, part)
        return part


def _fields(trie: Any) -> tuple[Any, ...]:
    return tuple(getattr(trie, name) for name in trie.__slots__)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, sender: RequestSender) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._sender = sender

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj).__name__
        if kind == "TokenTrie":
            return _trie, self._sender.trie(obj)
        if kind == "CompiledGrammar":
            return _grammar, self._sender.grammar(obj)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, receiver: RequestReceiver) -> None:
        super().__init__(file)
        self._receiver = receiver

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__:
            return self._receiver.trie if name == _trie.__name__ else self._receiver.grammar
        return super().find_class(module, name)


def _trie(key: int, packed: Any) -> Any:
    """Stands in the bytes for `RequestReceiver.trie`."""
    raise NotImplementedError


def _grammar(key: int, packed: Any) -> Any:
    """Stands in the bytes for `RequestReceiver.grammar`."""
    raise NotImplementedError

"""Frames of bytes over a socket pair: both ends.

The parent's end never waits inside a call for longer than it is told to; the child's end waits as long as it takes.
"""

from __future__ import annotations

import select
import socket
import struct
from collections import deque
from typing import NamedTuple

_HEADER = struct.Struct("<cQ")
_CHUNK = 1 << 18


class Frame(NamedTuple):
    """`kind` is one byte."""

    kind: bytes
    payload: bytes


class ParentEnd:
    """Sends and receives without waiting for the other side to do the opposite."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        end.setblocking(False)
        self._outgoing: deque[memoryview] = deque()
        self._incoming = bytearray()
        self._poll = select.poll()

    def send(self, frame: Frame) -> None:
        """Sends a frame, or as much of it as there is room for now and the rest in `exchange`."""
        self._outgoing.append(memoryview(_HEADER.pack(frame.kind, len(frame.payload)) + frame.payload))
        if len(self._outgoing) == 1:
            self._push()

    def exchange(self, seconds: float) -> list[Frame]:
        """The frames that have come, after waiting `seconds` for one at most; none may be complete.

        Raises:
            EOFError: the other end is gone, and all that it sent was given.
        """
        wanted = select.POLLIN | (select.POLLOUT if self._outgoing else 0)
        self._poll.register(self._socket, wanted)
        events = dict(self._poll.poll(seconds * 1000)).get(self._socket.fileno(), 0)
        if events & select.POLLOUT:
            self._push()
        if events & ~select.POLLOUT:
            try:
                chunk = self._socket.recv(_CHUNK)
            except BlockingIOError:
                return []
            except OSError:
                chunk = b""
            if not chunk:
                raise EOFError
            self._incoming += chunk
        return self._complete_frames()

    def close(self) -> None:
        self._socket.close()

    def _push(self) -> None:
        try:
            while self._outgoing:
                first = self._outgoing[0]
                rest = first[self._socket.send(first) :]
                if rest:
                    self._outgoing[0] = rest
                else:
                    self._outgoing.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self._outgoing.clear()  # the other end is gone, as receiving will tell

    def _complete_frames(self) -> list[Frame]:
        frames = []
        at = 0
        while len(self._incoming) - at >= _HEADER.size:
            kind, length = _HEADER.unpack_from(self._incoming, at)
            begin = at + _HEADER.size
            if len(self._incoming) - begin < length:
                break
            at = begin + length
            frames.append(Frame(kind, bytes(self._incoming[begin:at])))
        del self._incoming[:at]
        return frames


class ChildEnd:
    """Waits for whole frames."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._stream = end.makefile("rb", buffering=_CHUNK)

    def send(self, frame: Frame) -> None:
        self._socket.sendall(_HEADER.pack(frame.kind, len(frame.payload)) + frame.payload)

    def receive(self) -> Frame | None:
        """The next frame; None: the other end is gone."""
        header = self._stream.read(_HEADER.size)
        if len(header) < _HEADER.size:
            return None
        kind, length = _HEADER.unpack(header)
        payload = self._stream.read(length)
        return Frame(kind, payload) if len(payload) == length else None

"""A small process from which those that prepare rows are forked, so that none is ever forked from the big one.

It is forked itself while its parent is small: the tokenizer is loaded, and there are no weights and no device. It waits
for its parent's word, so that it sees at once when the parent is gone; its children go with it.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import os
import pickle
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from pagedbatch.errors import RunError
from pagedbatch.input.preparation.links import ChildEnd, ParentEnd

_IGNORED = (signal.SIGINT, signal.SIGTERM)  # the terminal sends them to all; what they mean, the parent decides
_SHOW_ERRORS = "PAGEDBATCH_TRACEBACK"
_PARALLELISM = "TOKENIZERS_PARALLELISM"
_MESSAGE_BYTES = 64
_PR_SET_PDEATHSIG = 1


def can_fork() -> bool:
    """Whether processes can be forked here without harm to the system's own libraries."""
    return sys.platform == "linux"


@dataclass(frozen=True, slots=True)
class ForkedChild:
    """A process that serves at the other end of `link`."""

    pid: int
    link: ParentEnd

    def cpu_seconds(self) -> float:
        """What it has used so far; 0 when it is gone."""
        try:
            with open(f"/proc/{self.pid}/stat", encoding="ascii", errors="replace") as file:
                times = file.read().rpartition(")")[2].split()[11:13]
        except (OSError, IndexError):
            return 0.0
        return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


class Zygote:
    """The parent's handle. `serve` is what each child does until the parent's end of its link is closed."""

    def __init__(self, serve: Callable[[ChildEnd], None]) -> None:
        self._control, theirs = map(_away_from_standard, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        self._pid = _fork_quietly()
        if self._pid == 0:
            _run_zygote(theirs, serve)
        theirs.close()

    def fork(self) -> ForkedChild:
        """A new child.

        Raises:
            RunError: it can't be made.
        """
        self._say("fork", 0)
        message, descriptors, _, _ = socket.recv_fds(self._control, _MESSAGE_BYTES, 1)
        if not descriptors:
            raise RunError("the process that prepares rows is gone, or can't be started again: was it killed?")
        return ForkedChild(pickle.loads(message), ParentEnd(socket.socket(fileno=descriptors[0])))

    def end(self, child: ForkedChild) -> int:
        """Ends a child, if it has not ended by itself: its exit code, negative for a signal.

        Raises:
            RunError: the zygote is gone.
        """
        child.link.close()
        self._say("end", child.pid)
        message = self._control.recv(_MESSAGE_BYTES)
        if not message:
            raise RunError("the process that prepares rows is gone: was it killed?")
        return os.waitstatus_to_exitcode(pickle.loads(message))

    def close(self) -> None:
        """Ends it, with all of its children."""
        self._control.close()
        with suppress(ChildProcessError):
            os.waitpid(self._pid, 0)

    def _say(self, word: str, pid: int) -> None:
        with suppress(OSError):  # its answer, the end of the stream, tells
            self._control.send(pickle.dumps((word, pid)))


def _away_from_standard(end: socket.socket) -> socket.socket:
    """The same socket under a number above those of stdin, stdout and stderr, which may have been closed."""
    if end.fileno() > 2:
        return end
    return socket.socket(fileno=fcntl.fcntl(end.detach(), fcntl.F_DUPFD_CLOEXEC, 3))


def _fork_quietly() -> int:
    """`os.fork`, with signals held back until the child has said which it ignores, and no library's warnings."""
    before = os.environ.get(_PARALLELISM)
    os.environ[_PARALLELISM] = "false"  # else tokenizers warns, and in the child waits for threads that aren't there
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads: the child uses none of theirs
            pid = os.fork()
        if pid == 0:
            for number in _IGNORED:
                signal.signal(number, signal.SIG_IGN)
        else:
            os.environ.pop(_PARALLELISM)
            if before is not None:
                os.environ[_PARALLELISM] = before
        return pid
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _run_zygote(control: socket.socket, serve: Callable[[ChildEnd], None]) -> NoReturn:
    code = 1
    try:
        gc.freeze()  # nothing of the parent's is ever collected here: closing or deleting is not for a copy to do
        _let_go_of_files(control.fileno())
        _obey(control, serve)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _obey(control: socket.socket, serve: Callable[[ChildEnd], None]) -> None:
    children: set[int] = set()
    while message := control.recv(_MESSAGE_BYTES):
        word, pid = pickle.loads(message)
        if word == "fork":
            pid, link = _fork_child(control, serve)
            children.add(pid)
            socket.send_fds(control, [pickle.dumps(pid)], [link.fileno()])
            link.close()
        else:
            children.remove(pid)
            control.send(pickle.dumps(_end(pid)))
    for pid in children:
        _end(pid)


def _fork_child(control: socket.socket, serve: Callable[[ChildEnd], None]) -> tuple[int, socket.socket]:
    parents, childs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    zygote = os.getpid()
    pid = os.fork()
    if pid:
        childs.close()
        return pid, parents
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        control.close()
        parents.close()
        if os.getppid() == zygote:
            serve(ChildEnd(childs))
            code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _end(pid: int) -> int:
    os.kill(pid, signal.SIGKILL)  # without effect on one that has ended by itself
    return os.waitpid(pid, 0)[1]


def _let_go_of_files(kept: int) -> None:
    """Closes what was inherited: whoever waits for a file or pipe of the parent to be closed must not wait for us."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1) if os.environ.get(_SHOW_ERRORS) else (0, 1, 2):
        os.dup2(nowhere, standard)
    os.closerange(3, kept)
    os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))

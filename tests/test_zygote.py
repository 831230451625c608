"""The processes that prepare rows: they hold nothing of their parent's, and go when it goes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pagedbatch.input.preparation.links import ChildEnd, Frame
from pagedbatch.input.preparation.zygote import ForkedChild, Zygote

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="nothing is forked there")

#: Says the numbers of itself, its zygote and a child that is busy for ever, and waits to be killed.
PARENT = """
import sys, time
from pagedbatch.input.preparation.zygote import Zygote

def serve(end):
    end.send(end.receive())
    while True:
        pass

def main():
    from pagedbatch.input.preparation.links import Frame
    zygote = Zygote(serve)
    child = zygote.fork()
    child.link.send(Frame(b"x", b""))
    while not child.link.exchange(1.0):
        pass
    print(zygote._pid, child.pid, flush=True)
    time.sleep(600)

main()
"""


def answers(child: ForkedChild) -> list[Frame]:
    while not (frames := child.link.exchange(1.0)):
        pass
    return frames


def test_nothing_is_left_when_the_parent_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(each) for each in parent.stdout.readline().split()]
    handles = [os.pidfd_open(pid) for pid in pids]
    parent.kill()
    parent.wait()
    # The pipe's end comes when nobody holds it any more, and a handle is readable when its process has ended.
    assert parent.stdout.read() == ""
    import select

    poll = select.poll()
    for handle in handles:
        poll.register(handle, select.POLLIN)
    ended: set[int] = set()
    while len(ended) < len(handles):
        for handle, _ in poll.poll():
            ended.add(handle)
            poll.unregister(handle)
    for handle in handles:
        os.close(handle)


def test_children_hold_nothing_of_the_parents_and_ignore_the_terminals_signals(tmp_path: Path) -> None:
    held = (tmp_path / "held").open("w")

    def serve(end: ChildEnd) -> None:
        while end.receive() is not None:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
            files = {name: os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")
                     if os.path.exists(f"/proc/self/fd/{name}")}  # fmt: skip
            end.send(Frame(b"f", json.dumps(files).encode()))

    zygote = Zygote(serve)
    try:
        child = zygote.fork()
        child.link.send(Frame(b"x", b""))
        files = json.loads(answers(child)[0].payload)
    finally:
        zygote.close()
        held.close()
    assert {files[name] for name in ("0", "1", "2")} == {os.devnull}
    others = [target for name, target in files.items() if int(name) > 2 and not target.startswith("/proc/")]
    assert len(others) == 1
    assert others[0].startswith("socket:")


def test_a_child_ends_with_its_exit_code_or_signal() -> None:
    def serve(end: ChildEnd) -> None:
        frame = end.receive()
        if frame is not None and frame.kind == b"c":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGABRT)

    zygote = Zygote(serve)
    try:
        for kind, code in ((b"c", 7), (b"s", -signal.SIGABRT)):
            child = zygote.fork()
            child.link.send(Frame(kind, b""))
            with pytest.raises(EOFError):
                answers(child)
            assert zygote.end(child) == code
        child = zygote.fork()
        assert zygote.end(child) in (-signal.SIGKILL, 0)  # it may see its link closed before it is killed
        assert child.cpu_seconds() == 0
    finally:
        zygote.close()


def test_frames_of_any_size_cross_both_ways_at_once() -> None:
    def serve(end: ChildEnd) -> None:
        while (frame := end.receive()) is not None:
            end.send(frame)

    sizes = [0, 1, 8, 9, 70_000, 3_000_000, 5, 3_000_000]
    zygote = Zygote(serve)
    try:
        child = zygote.fork()
        for i, size in enumerate(sizes):
            child.link.send(Frame(bytes([65 + i]), bytes([i]) * size))
        found: list[Frame] = []
        while len(found) < len(sizes):
            found += answers(child)
    finally:
        zygote.close()
    assert found == [Frame(bytes([65 + i]), bytes([i]) * size) for i, size in enumerate(sizes)]

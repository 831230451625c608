"""Whatever fails or dies, and wherever: the same command again gives the same bytes, each row once, nothing left over.

The jobs here are whole but for the model (`tiny_job`), so that every single system call can be made to fail.
"""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_job import EchoRunner, SilentView, without_model

from pagedbatch.errors import PagedBatchError, RunError, UsageError
from pagedbatch.output import journal
from pagedbatch.run.job import JobResult, Ui, run_job
from pagedbatch.settings import merge
from pagedbatch.step import ModelRunnerOutput, SampleResult, SchedulerOutput

ROWS = [{"id": f"r{i}", "prompt": f"row {chr(97 + i % 26)}", **({"n": 2} if i % 3 == 0 else {})} for i in range(12)]
ROWS[5]["prompt"] = ""  # an error row

#: The calls through which a job changes what is on the disk, but for the last one, which removes the journal.
CALLS = ("pwrite", "write", "fsync", "replace", "ftruncate")


@dataclass
class Job:
    """A folder with an input, and the job on it."""

    folder: Path

    def __post_init__(self) -> None:
        self.write(b"".join(json.dumps(row).encode() + b"\n" for row in ROWS))

    @property
    def output(self) -> Path:
        return self.folder / "out.jsonl"

    @property
    def journal(self) -> Path:
        return self.folder / "out.jsonl.journal"

    @property
    def finished(self) -> Path:
        """Where the journal stays once the run is finished, for its error row."""
        return self.folder / "out.jsonl.finished"

    def clear(self) -> None:
        for path in (self.output, self.journal, self.finished):
            path.unlink(missing_ok=True)

    def write(self, data: bytes) -> None:
        (self.folder / "in.jsonl").write_bytes(data)

    def run(self, update: Callable[[], None] = lambda: None, **given: Any) -> JobResult:
        view = SilentView()
        view.update = lambda *_: update()  # type: ignore[method-assign]
        defaults = {"input": str(self.folder / "in.jsonl"), "model": "none", "output": str(self.output)}
        plain = merge({**defaults, "max_tokens": 3, "temperature": 1.0, "max_num_seqs": 4, **given}, {})
        with without_model():
            return run_job(plain, Ui(notice=lambda _: None, open_view=lambda *_: view))

    def names(self) -> set[str]:
        return {path.name for path in self.folder.iterdir()}

    def check_whole(self, reference: bytes) -> None:
        """What must stand there after the last run, however the others ended: the journal is kept for its error row."""
        assert self.output.read_bytes() == reference
        assert self.names() == {"in.jsonl", "out.jsonl", "out.stats.json", "out.jsonl.finished"}
        stats = json.loads((self.folder / "out.stats.json").read_text())
        assert (stats["rows"]["ok"], stats["rows"]["error"]) == (11, 1)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    folder = tmp_path / "job"
    folder.mkdir()
    return Job(folder)


@pytest.fixture
def reference(tmp_path: Path) -> bytes:
    folder = tmp_path / "reference"
    folder.mkdir()
    whole = Job(folder)
    assert whole.run().exit_code == 3
    assert [json.loads(line)["index"] for line in whole.output.read_bytes().splitlines()] == list(range(12))
    return whole.output.read_bytes()


def _break_call(patch: pytest.MonkeyPatch, name: str, nth: int, act: Callable[[Callable[..., Any], Any], None]) -> Any:
    """At the nth call of `os.name`, `act` is called with the real function and the arguments."""
    real = getattr(os, name)
    seen = SimpleNamespace(calls=0)

    def broken(*args: Any, **kwargs: Any) -> Any:
        seen.calls += 1
        if seen.calls == nth:
            act(real, args)
        return real(*args, **kwargs)

    patch.setattr(os, name, broken)
    return seen


def _half(real: Callable[..., Any], args: Any) -> None:
    """The first half of a write."""
    if real.__name__ in ("write", "pwrite"):
        descriptor, data, *offset = args
        real(descriptor, data[: len(data) // 2], *offset)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("name", CALLS)
def test_any_call_that_fails_is_one_line_and_the_next_run_completes(
    job: Job, reference: bytes, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    monkeypatch.setattr(journal, "_SYNC_ROWS", 4)

    def fail(real: Callable[..., Any], args: Any) -> None:
        _half(real, args)
        raise OSError(number, os.strerror(number))

    for nth in range(1, 1000):
        with monkeypatch.context() as patch:
            seen = _break_call(patch, name, nth, fail)
            messages: list[str] = []
            try:
                job.run()
            except PagedBatchError as error:
                messages.append(str(error))
        for message in messages:
            assert os.strerror(number) in message
            assert "\n" not in message
        if seen.calls < nth:
            break
        assert not job.output.exists() or job.output.read_bytes() == reference
        assert job.run().exit_code == 3
        job.check_whole(reference)
        job.clear()
    assert nth > 1


@pytest.mark.parametrize("when", ["before", "half way", "after"])
@pytest.mark.parametrize("name", CALLS)
def test_death_at_any_call_loses_nothing_that_was_finished(
    job: Job, reference: bytes, monkeypatch: pytest.MonkeyPatch, name: str, when: str
) -> None:
    def die(real: Callable[..., Any], args: Any) -> None:
        if when == "half way":
            _half(real, args)
        elif when == "after":
            real(*args)
        os._exit(9)

    for nth in range(1, 1000):
        child = os.fork()
        if child == 0:
            try:
                with pytest.MonkeyPatch.context() as patch:
                    _break_call(patch, name, nth, die)
                    job.run()
            finally:
                os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
            break
        assert not job.output.exists() or job.output.read_bytes() == reference
        kept = job.journal if job.journal.exists() else job.finished
        written = [line for line in kept.read_bytes().splitlines(keepends=True)[1:] if line.endswith(b"}}\n")]
        finished = sum(json.loads(line)["journal"]["row"] >= 0 for line in written)
        result = job.run()
        if finished < len(ROWS):
            assert result.stats.rows.resumed == finished
        job.check_whole(reference)
        job.clear()
    assert nth > 1


def test_a_cut_journal_gives_the_same_output(job: Job, reference: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda _: None)
    job.run()
    lines = job.finished.read_bytes().splitlines(keepends=True)
    assert b"finished" in lines.pop()
    whole = b"".join(lines)
    for length in range(len(whole) - sum(map(len, lines[-3:])), len(whole), 17):
        job.journal.write_bytes(whole[:length])
        job.output.unlink()
        job.run()
        job.check_whole(reference)


def test_a_damaged_journal_is_refused_with_the_way_out(job: Job, reference: bytes) -> None:
    job.run()
    data = bytearray(job.finished.read_bytes())
    data[len(data) // 2] ^= 1
    job.finished.write_bytes(data)
    with pytest.raises(UsageError, match="with whole records behind it") as refused:
        job.run()
    command = str(refused.value).split("`")[1]
    subprocess.run(command, shell=True, check=True)
    job.run()
    job.check_whole(reference)


def test_what_is_finished_needs_no_model(job: Job, reference: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after the last rename, before the journal was ended: the model is not loaded to find nothing to do."""
    good = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS if row["prompt"])
    job.write(good)
    child = os.fork()
    if child == 0:
        unlink = os.unlink
        monkeypatch.setattr("os.unlink", lambda path: os._exit(9) if Path(path) == job.journal else unlink(path))
        job.run()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    output, stats = job.output.read_bytes(), (job.folder / "out.stats.json").read_bytes()
    monkeypatch.setattr(EchoRunner, "__init__", None)
    assert job.run().exit_code == 0
    assert job.output.read_bytes() == output
    assert (job.folder / "out.stats.json").read_bytes() == stats
    assert not job.journal.exists()


def test_two_runs_never_share_an_output(job: Job, reference: bytes) -> None:
    refused: list[str] = []

    def second_run() -> None:
        if not refused:
            with pytest.raises(UsageError, match="another run writes the same output") as info:
                job.run()
            refused.append(str(info.value))

    job.run(second_run)
    assert refused
    job.check_whole(reference)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1


def test_killed_at_random_moments(job: Job, reference: bytes) -> None:
    code = (
        "import sys; from pathlib import Path; from test_faults import Job; job = Job(Path(sys.argv[1]))\n"
        "while job.run(restart=True): pass"
    )
    for seed in range(3):
        size = random.Random(seed).randrange(2000)
        with subprocess.Popen([sys.executable, "-c", code, job.folder], cwd=Path(__file__).parent) as process:
            while process.poll() is None and _size(job.journal) <= size:
                os.sched_yield()
            process.send_signal(signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL
        job.run()
        job.check_whole(reference)
        job.clear()


def test_stdout_that_is_full_is_a_run_error(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        monkeypatch.setattr(sys, "stdout", SimpleNamespace(buffer=full))
        with pytest.raises(RunError, match="can't write the output to stdout: No space left on device"):
            job.run(output="-")
    assert job.names() == {"in.jsonl"}


def test_an_input_cut_short_during_the_run_is_no_success(job: Job) -> None:
    def cut() -> None:
        job.write(b"")

    job.write(b"".join(json.dumps({"prompt": "x" * 40}).encode() + b"\n" for _ in range(10_000)))
    with pytest.raises(RunError, match="holds fewer rows than when the run began"):
        job.run(cut)
    assert job.journal.exists()
    assert not job.output.exists()


def test_a_bug_that_one_row_brings_out_stays_with_it(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    from tiny_job import ByteTokenizer

    def encode(self: ByteTokenizer, text: str, **_: Any) -> dict[str, list[int]]:
        if text == "row c":
            raise OverflowError("bad luck\nand more")
        return {"input_ids": list(text.encode())}

    def decode(self: ByteTokenizer, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        if token_ids[0] == ord("e"):
            raise OverflowError("no text")
        return bytes(token_ids).decode()

    execute = EchoRunner.execute

    def no_numbers(self: EchoRunner, step: SchedulerOutput) -> ModelRunnerOutput:
        result = execute(self, step)
        for task, i in zip(step.samples, range(len(step.samples)), strict=True):
            if step.sequences[task.seq_index].token_ids[-1] == ord("g"):
                result.samples[i] = SampleResult([], [], error="the logits are not numbers")
        return result

    monkeypatch.setattr(ByteTokenizer, "__call__", encode)
    monkeypatch.setattr(ByteTokenizer, "decode", decode)
    monkeypatch.setattr(EchoRunner, "execute", no_numbers)
    assert job.run(max_tokens=1, n=1).exit_code == 3
    records = [json.loads(line) for line in job.output.read_bytes().splitlines()]
    assert {record["id"]: record["error"] for record in records if record["error"]} == {
        "r2": "line 3: can't be read: OverflowError: bad luck",
        "r3": "line 4: its answer can't be written: OverflowError: no text",
        "r5": "line 6: the prompt is empty: it has no token to start from",
        "r6": "line 7: the logits are not numbers",
    }


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["\ud800", "\u2028\x85\x0b"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
_NAMES = st.sampled_from(
    ["id", "prompt", "messages", "prompt_token_ids", "n", "max_tokens", "temperature", "stop", "seed", "logit_bias",
     "priority", "custom_id", "url", "body", "logprobs", "bad_words", "min_tokens", "num_beams", "meta"]
)  # fmt: skip
_OBJECTS = st.dictionaries(_NAMES, _VALUES, max_size=4).map(lambda row: json.dumps(row).encode())
_GOOD = st.fixed_dictionaries({"prompt": st.text(min_size=1, max_size=9)}).map(lambda row: json.dumps(row).encode())
_LINES = st.one_of(
    _GOOD,
    _OBJECTS,
    st.tuples(_OBJECTS, st.integers(0, 60)).map(lambda cut: cut[0][: cut[1]]),
    st.tuples(_OBJECTS, st.binary(max_size=4), st.integers(0, 60)).map(lambda x: x[0][: x[2]] + x[1] + x[0][x[2] :]),
    st.binary(max_size=30),
)


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(st.lists(_LINES, max_size=12), st.sampled_from([b"\n", b"\r\n"]), st.booleans(), st.booleans())
def test_any_bytes_give_each_line_one_strict_record(
    job: Job, lines: list[bytes], end: bytes, ended: bool, keep: bool
) -> None:
    data = end.join([b'{"prompt": "first"}', *lines]) + end * ended
    expected = [line for line in data.split(b"\n") if line.strip(b" \t\r")]
    job.write(data)
    job.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda _: None)
        result = job.run(
            max_line_bytes=120, allow_duplicate_ids=True, num_blocks=50, **({"keep": ["*"]} if keep else {})
        )
    records = [json.loads(line, parse_constant=_refuse) for line in job.output.read_bytes().split(b"\n")[:-1]]
    assert len(records) == len(expected)
    for index, record in enumerate(records):
        assert record.get("index", index) == index
        assert record.get("input") is not None or not keep
        json.dumps(record, ensure_ascii=False).encode()
    failed = sum(record["error"] is not None for record in records)
    assert result.exit_code == (3 if failed else 0)
    counts = {"total": len(records), "ok": len(records) - failed, "error": failed, "resumed": 0}
    assert result.stats.rows.to_json() == counts
    assert result.stats.memory.final_live_blocks == 0


def _refuse(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")

"""The journal: nothing that was finished is lost, nothing that was cut or damaged is believed."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from journal_files import MANIFEST, fill, finished_rows, record

from pagedbatch.errors import RunError, UsageError
from pagedbatch.fingerprint import Content, file_content
from pagedbatch.output.durable import write_atomically
from pagedbatch.output.journal import Journal
from pagedbatch.output.journal_entry import seal, unseal
from pagedbatch.output.paths import finished_name, output_paths
from pagedbatch.stats.schema import ModelIdentity


def _open(output: str) -> Journal:
    paths = output_paths(output, "-")
    assert paths is not None
    return Journal.open(paths.journal, MANIFEST, num_rows=1)


@pytest.fixture
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that open thousands of journals: no waiting for the disk."""
    monkeypatch.setattr("os.fsync", lambda _: None)


def test_records_come_back_in_input_order(tmp_path: Path) -> None:
    path = tmp_path / "j"
    fill(path, [3, 0])
    with Journal.open(path, MANIFEST, num_rows=5) as journal:
        assert [row in journal for row in range(5)] == [True, False, False, True, False]
        assert (journal.num_resumed, journal.num_ok, journal.num_error) == (2, 1, 1)
        journal.append(1, record(1), ok=False)
        journal.append(2, record(2), ok=True)
        assert list(journal.records()) == [record(row) for row in (0, 1, 2, 3)]
        assert (journal.num_resumed, journal.num_ok, journal.num_error) == (2, 2, 2)


def test_each_line_is_json_as_it_stands(tmp_path: Path) -> None:
    lines = fill(tmp_path / "j", [0, 1]).splitlines()
    manifest, first, second = map(json.loads, lines)
    assert manifest["model"] == {"name": "M", "fingerprint": "abc"}
    assert {**json.loads(record(0)), "journal": first["journal"]} == first
    assert (second["journal"]["row"], second["journal"]["ok"]) == (1, False)


@pytest.mark.usefixtures("unsynced")
def test_cut_anywhere_the_whole_lines_count(tmp_path: Path) -> None:
    path = tmp_path / "j"
    rows = [4, 0, 2]
    data = fill(path, rows)
    ends = [i + 1 for i, byte in enumerate(data) if byte == ord("\n")]
    for length in range(len(data) + 1):
        path.write_bytes(data[:length])
        whole = sum(end <= length for end in ends[1:])
        with Journal.open(path, MANIFEST, num_rows=5) as journal:
            assert [row for row in rows if row in journal] == rows[:whole]
            for row in range(5):
                if row not in journal:
                    journal.append(row, record(row), ok=True)
            assert len(finished_rows(journal)) == 5


@pytest.mark.usefixtures("unsynced")
@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_a_changed_byte_is_refused_in_the_middle_and_redone_at_the_end(tmp_path: Path, flip: int) -> None:
    path = tmp_path / "j"
    rows = [4, 0, 2]
    data = fill(path, rows)
    ends = [i + 1 for i, byte in enumerate(data) if byte == ord("\n")]
    # Each byte is changed in one of three ways, a line end in all three.
    for at in sorted({*range(flip % 3, len(data), 3), *(end - 1 for end in ends)}):
        damaged = bytearray(data)
        damaged[at] ^= flip
        path.write_bytes(damaged)
        line = sum(end <= at for end in ends)
        joined = line + (damaged[at] != data[at] and data[at] == ord("\n"))  # a lost line end takes the next line too
        if line == 0:
            with pytest.raises(UsageError, match="pass --restart"):
                Journal.open(path, MANIFEST, num_rows=5)
        elif joined >= len(rows):
            with Journal.open(path, MANIFEST, num_rows=5) as journal:
                assert [row for row in rows if row in journal] == rows[: line - 1]
                for row in range(5):
                    if row not in journal:
                        journal.append(row, record(row), ok=True)
                assert len(finished_rows(journal)) == 5
        else:
            with pytest.raises(UsageError, match=rf"is damaged at byte {ends[line - 1]}, with whole records behind"):
                Journal.open(path, MANIFEST, num_rows=5)
            assert path.read_bytes() == damaged
            path.write_bytes(damaged[: ends[line - 1]])  # what the message says to do
            with Journal.open(path, MANIFEST, num_rows=5) as journal:
                assert [row for row in rows if row in journal] == rows[: line - 1]


@pytest.mark.parametrize(
    ("written", "other"),
    [(b'"row": 1', b'"row": true'), (b'"row": 1', b'"row": 1.0'), (b'"ok": true', b'"ok": 1')],
    ids=str,
)
def test_a_trailer_of_other_types_is_damaged(written: bytes, other: bytes) -> None:
    """The checksum alone would take `true` for 1."""
    line = seal(b'{"id": "a"}', row=1, ok=True)
    assert unseal(line) is not None
    assert written in line
    assert unseal(line.replace(written, other)) is None


@given(st.dictionaries(st.text(), st.text() | st.integers()), st.integers(0, 2**40), st.booleans())
def test_sealing_and_unsealing(record: dict[str, object], row: int, ok: bool) -> None:
    data = json.dumps(record, ensure_ascii=True).encode()
    if record:
        entry = unseal(seal(data, row=row, ok=ok))
        assert entry is not None
        assert (entry.record, entry.row, entry.ok) == (data, row, ok)


def test_other_settings_input_or_model_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "j"
    before = fill(path, [1])
    settings = {"temperature": 0.7, "stop": ["a"], "dtype": "auto", "n": 2}
    other = replace(MANIFEST, model=ModelIdentity(name="N", fingerprint="def"), settings=settings)
    with pytest.raises(UsageError) as refused:
        Journal.open(path, other, num_rows=5)
    assert "(model: was 'M', now 'N'; temperature: was 0.5, now 0.7; n: was None, now 2)" in str(refused.value)
    for changed, reason in (
        (replace(MANIFEST, input=Content("in.jsonl", 3, ("f01",))), "input: its content has changed"),
        (replace(MANIFEST, model=ModelIdentity(name="M", fingerprint="def")), "model: its files changed"),
    ):
        with pytest.raises(UsageError, match=reason):
            Journal.open(path, changed, num_rows=5)
    assert path.read_bytes() == before
    with Journal.open(path, other, num_rows=5, restart=True) as journal:
        assert journal.num_finished == 0


def test_names_of_input_and_model_do_not_count(tmp_path: Path) -> None:
    fill(tmp_path / "j", [1])
    moved = replace(
        MANIFEST, input=replace(MANIFEST.input, name="../in.jsonl"), model=ModelIdentity(name="./M", fingerprint="abc")
    )
    with Journal.open(tmp_path / "j", moved, num_rows=5) as journal:
        assert journal.num_resumed == 1


def test_an_input_that_grew_is_taken_and_noted(tmp_path: Path) -> None:
    path, source = tmp_path / "j", tmp_path / "in.jsonl"

    def resume(text: str, num_rows: int) -> int:
        source.write_text(text)
        manifest = replace(MANIFEST, input=file_content("in", source, may_grow=True, chunk_bytes=4))
        with Journal.open(path, manifest, num_rows=num_rows) as journal:
            resumed = journal.num_resumed
            for row in range(num_rows):
                if row not in journal:
                    journal.append(row, record(row), ok=True)
            finished_rows(journal, num_rows)
        return resumed

    assert resume("a\nb\n", 2) == 0
    assert resume("a\nb\nc\nd\n", 4) == 2
    before = path.read_bytes()
    with pytest.raises(UsageError, match="input: changed between byte 4 and byte 8"):  # rows that came later count too
        resume("a\nb\nc\nX\ne\n", 5)
    with pytest.raises(UsageError, match="input: was 8 bytes, now 4"):
        resume("a\nb\n", 2)
    assert path.read_bytes() == before
    assert resume("a\nb\nc\nd\ne\n", 5) == 4
    assert path.read_bytes().count(b"pagedbatch_journal") == 3


def test_error_rows_can_be_run_again(tmp_path: Path) -> None:
    path = tmp_path / "j"
    fill(path, [0, 1, 3])
    with Journal.open(path, MANIFEST, num_rows=5, retry_errors=True) as journal:
        assert (journal.num_resumed, journal.num_retried, journal.num_error) == (1, 2, 0)
        journal.append(1, record(1), ok=True)
    with Journal.open(path, MANIFEST, num_rows=5) as journal:
        assert (journal.num_ok, journal.num_error) == (2, 1)
        assert len(finished_rows(journal)) == 3


def test_a_kept_journal_gives_way_to_another_run_only_when_its_output_was_written(tmp_path: Path) -> None:
    path = tmp_path / "j"
    fill(path, [0, 1, 2, 3, 4])
    other = replace(MANIFEST, settings={})
    with pytest.raises(UsageError, match="is of another run"):
        Journal.open(path, other, num_rows=5)
    with Journal.open(path, MANIFEST, num_rows=5) as journal:
        assert journal.is_complete
        journal.mark_finished()
    assert not path.exists()
    marked = finished_name(path).read_bytes()
    with Journal.open(path, MANIFEST, num_rows=5, retry_errors=True) as journal:
        assert journal.num_finished == 3
        journal.append(1, record(1), ok=False)
    with pytest.raises(UsageError, match="is of another run"):  # the retry has not ended
        Journal.open(path, other, num_rows=5)
    path.unlink()
    finished_name(path).write_bytes(marked)
    with Journal.open(path, other, num_rows=5) as journal:
        assert journal.num_finished == 0


def test_other_versions_resume(tmp_path: Path) -> None:
    path = tmp_path / "j"
    fill(path, [1])
    with Journal.open(path, replace(MANIFEST, versions={"pagedbatch": "2"}), num_rows=5) as journal:
        assert journal.num_resumed == 1
        assert journal.stored_versions == {"pagedbatch": "1"}


def test_rows_past_a_smaller_limit_wait(tmp_path: Path) -> None:
    path = tmp_path / "j"
    fill(path, [4, 1])
    with Journal.open(path, MANIFEST, num_rows=2) as journal:
        assert finished_rows(journal, 2) == [record(1)]
        assert journal.num_finished == 1
    with Journal.open(path, MANIFEST, num_rows=5) as journal:
        assert journal.num_finished == 2


def test_two_runs_cannot_share_a_journal(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with Journal.open(path, MANIFEST, num_rows=5) as journal:
        journal.append(0, record(0), ok=True)
        code = "import fcntl, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        assert b"BlockingIOError" in subprocess.run([sys.executable, "-c", code, path], capture_output=True).stderr
        with pytest.raises(UsageError, match="another run writes the same output"):
            Journal.open(path, MANIFEST, num_rows=5)
        assert 0 in journal


def test_an_empty_new_journal_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "j"
    Journal.open(path, MANIFEST, num_rows=5).close()
    assert not path.exists()
    fill(path, [0])
    Journal.open(path, MANIFEST, num_rows=5).close()
    assert path.exists()


def test_a_file_that_is_no_journal_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_text("my notes\n")
    with pytest.raises(UsageError, match="is not a journal that this version can resume"):
        Journal.open(path, MANIFEST, num_rows=5)
    assert path.read_text() == "my notes\n"
    path.write_text("my notes")
    with pytest.raises(UsageError, match="is not a journal that this version can resume"):
        Journal.open(path, MANIFEST, num_rows=5)
    assert path.read_text() == "my notes"


def test_files_are_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"old")

    def failing() -> object:
        yield b"new"
        raise OSError(28, "No space left on device")

    with pytest.raises(RunError, match=r"can't write .*: No space left"):
        write_atomically(path, failing())
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("out", b"old")]
    write_atomically(path, [b"new", b"er"])
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("out", b"newer")]


def test_names_of_the_files_of_a_run(tmp_path: Path) -> None:
    paths = output_paths(str(tmp_path / "results.jsonl"), "-")
    assert paths is not None
    assert (paths.output.name, paths.stats.name, paths.journal.name) == (
        "results.jsonl",
        "results.stats.json",
        "results.jsonl.journal",
    )
    assert output_paths("-", "in.jsonl") is None


@pytest.mark.parametrize("own", ["x.jsonl", "x.stats.json", "x.jsonl.journal"])
def test_the_input_is_never_overwritten(tmp_path: Path, own: str) -> None:
    source = tmp_path / own
    source.write_text("{}")
    link = tmp_path / "link"
    link.symlink_to(source)
    for name in (source, link):
        with pytest.raises(UsageError, match="would overwrite the input"):
            output_paths(str(tmp_path / "x.jsonl"), str(name))


def test_outputs_that_cannot_be_written(tmp_path: Path) -> None:
    for output, reason in (
        (tmp_path, "is a folder"),
        (tmp_path / "none" / "x.jsonl", "does not exist: make it first"),
        (Path("/dev/null"), "is not a regular file: use --output -"),
        (Path("/proc/x.jsonl"), "can't (write|be written)"),
    ):
        with pytest.raises(UsageError, match=reason):
            _open(str(output))


def test_a_link_as_output_keeps_pointing_at_its_file(tmp_path: Path) -> None:
    target = tmp_path / "far" / "real.jsonl"
    target.parent.mkdir()
    link = tmp_path / "link.jsonl"
    link.symlink_to(target)
    paths = output_paths(str(link), "-")
    assert paths is not None
    assert paths.output == target
